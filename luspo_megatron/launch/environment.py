"""Who am I among the ranks? torchrun's variables, from whatever has started this process.

torch.distributed reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. torchrun and an ssh loop
set them; srun and mpirun set their own, which are translated here. The master is the first node of the step's node
list, never SLURM_LAUNCH_NODE_IPADDR, which may be a login node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from luspo_megatron.errors import UserError
from luspo_megatron.launch import allocation
from luspo_megatron.launch.stop import TERM_STOPS

# (rank, world size, rank on the node, ranks on the node) as launchers name them
LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def launcher_of(env: Mapping[str, str]) -> str | None:
    """The launcher whose rank this process is; None for a process that a person, or a batch script, has started.

    Under Slurm only a step of several tasks counts: a one-task step starts the ranks itself.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return "torchrun"
    for name, (rank, size, *_) in LAUNCHERS.items():
        if rank not in env:
            continue
        if name == "srun" and "SLURM_STEP_ID" not in env and "SLURM_JOB_ID" in env and size not in env:
            continue  # the batch script: it has SLURM_PROCID=0 and the job's SLURM_NTASKS, but is no step
        tasks = env.get(size, env.get("SLURM_NTASKS", "1") if name == "srun" else "1")
        if tasks.isdigit() and int(tasks) > 1:
            return name
    return None


def adopt(env: MutableMapping[str, str] | None = None) -> None:
    """Sets torchrun's variables where the launcher has not. Nothing for a process without a launcher."""
    env = os.environ if env is None else env
    name = launcher_of(env)
    if name is None:
        return
    if name == "torchrun":
        if "LOCAL_RANK" not in env and "LOCAL_WORLD_SIZE" in env:
            env["LOCAL_RANK"] = str(int(env["RANK"]) % int(env["LOCAL_WORLD_SIZE"]))
    else:
        rank, size, local, on_node = LAUNCHERS[name]
        env["RANK"], env["WORLD_SIZE"] = env[rank], env.get(size) or env["SLURM_NTASKS"]
        env.setdefault("LOCAL_RANK", env.get(local, "0"))
        if name == "srun":
            env[TERM_STOPS] = "1"
        count = env.get(on_node, "").split("(")[0].split(",")[0]
        if count.isdigit():
            env.setdefault("LOCAL_WORLD_SIZE", count)
    if "MASTER_ADDR" not in env:
        if name != "srun":
            raise UserError(f"MASTER_ADDR is not set; export it for {name} (the first node's address) with MASTER_PORT")
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env["SLURM_NODELIST"]
        env["MASTER_ADDR"] = allocation.address_of(allocation.expand_nodes(nodes)[0])
    if "MASTER_PORT" not in env:
        if name != "srun":
            raise UserError(f"MASTER_PORT is not set; export a free port for {name}")
        # every task must choose the same one without talking
        number = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", "0"))
        env["MASTER_PORT"] = str(20000 + number % 10000)
