#!/usr/bin/env bash
# A Slurm cluster on this machine for the tests: several slurmd on loopback, fake GPUs, nothing outside FOLDER.
#
#   cluster.sh start FOLDER [NODES=16] [GPUS=8]     cluster.sh stop FOLDER
#
# Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Ports are fixed: one cluster at a time.
set -euo pipefail
ACTION="$1" BASE="$(realpath -m "$2")" NODES="${3:-16}" GPUS="${4:-8}"
export SLURM_CONF="$BASE/slurm.conf"

list_processes() { # number and name of each daemon
    local file pid
    for file in "$BASE"/run/*.pid "$BASE"/munge/munged.pid; do
        pid="$(cat "$file" 2>/dev/null || true)"
        if [ -n "$pid" ] && [ -r "/proc/$pid/comm" ]; then echo "$pid $(cat "/proc/$pid/comm")"; fi
    done
}

if [ "$ACTION" = stop ]; then
    scancel -u "$(id -un)" 2>/dev/null || true
    scontrol shutdown 2>/dev/null || true
    for _ in $(seq 50); do ls "$BASE"/run/*.pid >/dev/null 2>&1 || break; sleep 0.1; done
    # what is still there of the processes that we started (a daemon can wait for a step that will not end)
    list_processes >>"$BASE/processes"
    for signal in TERM KILL; do
        while read -r pid name; do
            if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$name" ]; then kill -s "$signal" "$pid" 2>/dev/null || true; fi
        done <"$BASE/processes"
        sleep 0.5
    done
    exit 0
fi

mkdir -p "$BASE"/{run,log,state,spool,dev,munge}
# a GPU is a device file whose name ends in its number
for i in $(seq 0 $((GPUS - 1))); do ln -sf /dev/null "$BASE/dev/gpu$i"; done

# munge on a socket and key of its own
(umask 077 && head -c 128 /dev/urandom >"$BASE/munge/munge.key")
chmod 711 "$BASE/munge"
/usr/sbin/munged --force --key-file="$BASE/munge/munge.key" --socket="$BASE/munge/munge.sock" \
    --pid-file="$BASE/munge/munged.pid" --log-file="$BASE/munge/munged.log" --seed-file="$BASE/munge/munged.seed"

cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$BASE/munge/munge.sock,cred_expire=5
SchedulerParameters=sched_interval=1,bf_interval=1,bf_resolution=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort=16817
SlurmctldPidFile=$BASE/run/slurmctld.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
StateSaveLocation=$BASE/state
SlurmdPidFile=$BASE/run/slurmd.%n.pid
SlurmdLogFile=$BASE/log/slurmd.%n.log
SlurmdSpoolDir=$BASE/spool/%n
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
KillWait=60
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
CONF
for i in $(seq "$NODES"); do
    mkdir -p "$BASE/spool/n$i"
    echo "NodeName=n$i NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((17000 + i)) CPUs=128 RealMemory=20000" \
        "Gres=gpu:$GPUS State=UNKNOWN" >>"$SLURM_CONF"
done
cat >>"$SLURM_CONF" <<CONF
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
echo "NodeName=n[1-$NODES] Name=gpu File=$BASE/dev/gpu[0-$((GPUS - 1))]" >"$BASE/gres.conf"

/usr/sbin/slurmctld -c
for i in $(seq "$NODES"); do /usr/sbin/slurmd -N "n$i"; done
for _ in $(seq 300); do
    if [ "$(sinfo -h -N -p main -t idle 2>/dev/null | wc -l)" -eq "$NODES" ]; then break; fi
    sleep 0.2
done
list_processes >"$BASE/processes"
if [ "$(sinfo -h -N -p main -t idle | wc -l)" -ne "$NODES" ]; then
    echo "the cluster did not come up: see $BASE/log" >&2
    exit 1
fi
