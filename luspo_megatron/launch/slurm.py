"""Start the ranks of a run in a Slurm allocation, watch them, and put the job back into the queue when it has to go.

`luspo train` in a batch script (or in an salloc shell) is the driver: it splits the nodes, starts one srun for the
trainers and one for the engine supervisors, copies what rank 0 says to the job's output, and acts on what happens:

    the supervisors of the engines' nodes end
                          it is said; whether enough engines are left is the fleet's to judge. Bad input ends the job
    a rank fails          the others are ended, the failed rank's last lines are shown, the job ends with its exit code
    SIGUSR1 (sbatch --signal=B:USR1@SECONDS), preemption
                          the ranks finish their step, save and end; the job is requeued and resumes
    SIGTERM (scancel)     the same without the requeue, as far as Slurm's KillWait reaches

Preemption reaches the ranks only, not the batch script: a rank that stops because it was asked to leaves a mark
(launch/stop.py), by which the driver knows it from the end of the run. Logs are <run_dir>/logs/rank-N.log, from the
second start (a requeue is one) rank-N.K.log. Engine supervisors (`luspo engines`) are one task per engine node; where
engines share the trainers' GPUs on several nodes, one per trainer node, beside its ranks (srun --overlap). They and the
run find each other through the registry folder <run_dir>/engines. With LUSPO_DRY_RUN=1 the ranks find each
other and end (launch/dry.py). Left out: choosing partitions and accounts, which are the site's; array jobs and chains
need nothing from here.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from luspo_megatron.config import LaunchConfig
from luspo_megatron.config_io import save_config
from luspo_megatron.engine_layout import layout_of
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.launch import allocation, dry
from luspo_megatron.launch.local import free_port, log_path, tail
from luspo_megatron.launch.rank import LOG
from luspo_megatron.launch.stop import MARK

POLL = 0.2  # seconds
AFTER_FAILURE = 5.0  # seconds that the other ranks get to say what they have met
REQUEUE_WAIT = 120.0  # seconds within which Slurm ends a job that it has taken back
DRY_SUPERVISOR = ["sh", "-c", 'echo "dry run: engines on $SLURMD_NODENAME, GPUs $CUDA_VISIBLE_DEVICES"']
EXIT_CANCELLED = 128 + signal.SIGTERM
# srun's options by environment, which would show a task one GPU only. Not --gpu-bind=none: with it Slurm 22.05 sets
# CUDA_VISIBLE_DEVICES to nothing.
GPU_BINDING = ("SLURM_GPU_BIND", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
# srun: error: n3: task 5: Exited with exit code 1      srun: error: n1: tasks 0-1,3: Killed
EXIT_CODE = re.compile(r"exit code (\d+)")
FAILED_TASK = re.compile(rb"srun: error: (\S+): tasks? (\d+)[\d,-]*: (.*)")


def wanted(settings: LaunchConfig, environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is to start its ranks by srun. UserError where it should and there is no allocation."""
    env = os.environ if environ is None else environ
    inside = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env
    if settings.launcher == "slurm" and not inside:
        raise UserError("--launch.launcher slurm: this is no Slurm allocation; submit with sbatch, or take auto")
    return settings.launcher == "slurm" or (settings.launcher == "auto" and inside)


def launch(module: str, config: Any, world_size: int, run_dir: str, settings: LaunchConfig) -> int:
    """Run ``python -m module --config FILE`` as ``world_size`` ranks of this allocation; returns the exit code."""
    nodes = allocation.expand_nodes(os.environ.get("SLURM_JOB_NODELIST", os.environ.get("SLURM_NODELIST", "")))
    split = allocation.split_nodes(nodes, world_size, settings.gpus_per_node, settings.engine_nodes)
    folder = (Path(run_dir) / "logs").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    start = start_number(folder, world_size)
    path = folder / (f"config.{start}.yaml" if start else "config.yaml")
    hosts = engine_hosts(config, split)
    registry = str(allocation.default_registry(folder.parent))
    if hosts:
        registry = config.rollout.registry or registry
        config = replace(config, rollout=replace(config.rollout, registry=registry))
    save_config(config, path)
    supervisor = [sys.executable, "-m", "luspo_megatron", "engines", "--config", str(path), "--registry", registry]
    job = Job(split, folder, start, settings, hosts, DRY_SUPERVISOR if dry.wanted() else supervisor)
    return job.run([sys.executable, "-m", "luspo_megatron.launch.rank", module, "--config", str(path)], world_size)


def engine_hosts(config: Any, split: allocation.Split) -> tuple[str, ...]:
    """The nodes that need a supervisor. None where the run starts its engines beside rank 0, or has them from outside.

    Colocated engines spread over the trainers' nodes; those of a run on one node are that node's.
    """
    rollout = getattr(config, "rollout", None)
    if rollout is None or rollout.urls:
        return ()
    if split.engines:
        return split.engines
    layout = layout_of(rollout)
    spread = len(split.trainers) > 1 and rollout.num_engines * layout.nodes > 1 and not rollout.registry
    return split.trainers[:layout.spread(rollout.num_engines, len(split.trainers))] if spread else ()


def start_number(folder: Path, world_size: int) -> int:
    """How often this run has been started before: the first number that no rank's log has."""
    start = 0
    while any(log_path(folder, rank, start).exists() for rank in range(world_size)):
        start += 1
    return start


def srun_command(nodes: Sequence[str], tasks: int, command: Sequence[str], *, one_for_all: bool = True) -> list[str]:
    """srun of ``command`` on these nodes of the allocation, ``tasks`` over them in blocks.

    Each task sees all GPUs of its node (a rank takes the one of its number; `_start` takes a site's bindings away), and
    steps may share CPUs and GPUs, because colocated engines use the trainers'. A task that fails does not end the step:
    Slurm would send SIGTERM, which ranks take for a request to stop, and SIGKILL only after KillWait; `_end_ranks` is
    quicker. ``one_for_all``: a node that is lost ends it.
    """
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    return ["srun", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", f"--ntasks={tasks}",
            f"--ntasks-per-node={tasks // len(nodes)}", "--distribution=block", "--overlap", "--mpi=none",
            "--input=none", f"--chdir={os.getcwd()}", *([f"--cpus-per-task={cpus}"] if cpus else []),
            "--kill-on-bad-exit=0", "--no-kill=off" if one_for_all else "--no-kill", *command]


@dataclass
class Job:
    """One start of a run."""

    split: allocation.Split
    folder: Path
    start: int
    settings: LaunchConfig
    hosts: Sequence[str] = ()  # of the engines
    supervisor: Sequence[str] = ()
    reasons: list[int] = field(default_factory=list)  # signals that have come
    copiers: list[threading.Thread] = field(default_factory=list)  # of the supervisors' output
    failed: list[tuple[str, int, str]] = field(default_factory=list)  # node, rank, how

    def run(self, command: Sequence[str], world_size: int) -> int:
        mark = self.folder / f"stopped.{os.environ['SLURM_JOB_ID']}.{self.start}"
        env = {**os.environ, **self._environment(), LOG: str(log_path(self.folder, 0, self.start)).replace(
            "rank-0", "rank-{rank}", 1), MARK: str(mark)}
        env.setdefault("OMP_NUM_THREADS", "1")
        self._say(f"job {os.environ['SLURM_JOB_ID']}, start {self.start + 1}: {world_size} ranks on "
                  f"{', '.join(self.split.trainers)}; master {env['MASTER_ADDR']}:{env['MASTER_PORT']}; logs "
                  f"{self.folder}")
        with self._signals(), contextlib.ExitStack() as stack:
            log = stack.enter_context(log_path(self.folder, 0, self.start).open("xb"))
            supervisors = self._start_supervisors(env, stack)
            trainers = _start(srun_command(self.split.trainers, world_size, command), env)
            stack.callback(_end, trainers)
            readers = [_copy(trainers.stdout, [sys.stdout.buffer, log], None),
                       _copy(trainers.stderr, [sys.stderr.buffer, log], self._notice)]
            code = self._watch(trainers, supervisors)
            if supervisors is not None and dry.wanted():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    supervisors.wait(60.0)
            for reader in readers:
                reader.join(5.0)
        return self._conclude(code, mark)

    def _engine_log(self) -> Path:
        return self.folder / (f"engines.{self.start}.log" if self.start else "engines.log")

    def _start_supervisors(self, env: Mapping[str, str],
                           stack: contextlib.ExitStack) -> subprocess.Popen[bytes] | None:
        """One per node with engines; their output goes to logs/engines.log, from the second start engines.K.log."""
        nodes = self.hosts
        if not nodes:
            return None
        path = self._engine_log()
        log = stack.enter_context(path.open("xb"))
        step = _start(srun_command(nodes, len(nodes), self.supervisor, one_for_all=False),
                      {name: value for name, value in env.items() if name not in (MARK, LOG)})
        stack.callback(_end, step)
        for source in (step.stdout, step.stderr):
            self.copiers.append(_copy(source, [log, sys.stdout.buffer] if dry.wanted() else [log], None))
        self._say(f"engines on {', '.join(nodes)}; log {path}")
        return step

    def _environment(self) -> dict[str, str]:
        first = self.split.trainers[0]
        here = os.environ.get("SLURMD_NODENAME") == first
        # a port that is free here, when here is where rank 0 will listen
        port = free_port() if here else 20000 + int(os.environ["SLURM_JOB_ID"]) % 10000
        return {"MASTER_ADDR": os.environ.get("MASTER_ADDR") or allocation.address_of(first),
                "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port)}

    # ---- what happens ------------------------------------------------------------------------------------------

    def _notice(self, line: bytes) -> None:
        if found := FAILED_TASK.search(line):
            self.failed.append((found[1].decode(), int(found[2]), found[3].decode(errors="replace")))

    def _watch(self, trainers: subprocess.Popen[bytes], supervisors: subprocess.Popen[bytes] | None) -> int:
        """Wait for the trainers, pass on the request to stop; the exit code of srun."""
        passed_on = False
        give_up = float("inf")
        while (code := trainers.poll()) is None:
            if supervisors is not None and not dry.wanted() and supervisors.poll() is not None:
                if supervisors.returncode == UserError.exit_code:
                    for copier in self.copiers:  # srun has ended; what it said may still be in the pipe
                        copier.join(5.0)
                    self._say("the engine supervisors refuse to start; the end of their log:")
                    print(tail(str(self._engine_log())), file=sys.stderr, flush=True)
                    return UserError.exit_code
                self._say(f"the engine supervisors ended with exit code {supervisors.returncode}")
                supervisors = None
            if self.reasons and not passed_on:
                passed_on = True
                give_up = time.monotonic() + self.settings.stop_grace
                name = signal.Signals(self.reasons[0]).name
                self._say(f"{name}: the ranks finish their step and save")
                trainers.send_signal(signal.SIGUSR1)  # srun hands it to every task
            if self.failed and give_up == float("inf"):
                give_up = time.monotonic() + AFTER_FAILURE
            if time.monotonic() > give_up:
                if not self.failed:
                    self._say("the ranks did not end in time; they are killed")
                _end_ranks(trainers)
                # srun's own code would be that of the ranks killed here
                return next((int(found[1]) for *_, how in self.failed if (found := EXIT_CODE.search(how))), 1)
            time.sleep(POLL)
        return code

    def _conclude(self, code: int, mark: Path) -> int:
        stopped = mark.exists()
        mark.unlink(missing_ok=True)
        cancelled = signal.SIGTERM in self.reasons or signal.SIGINT in self.reasons
        if cancelled:
            self._say("cancelled" + (": saved; submit again to go on" if stopped else ""))
            return EXIT_CANCELLED
        if stopped or (self.reasons and code):
            if not stopped:
                self._say("the ranks did not save; the job goes on from the last checkpoint")
            return self._requeue()
        if code:
            self._explain(code)
        return code

    def _explain(self, code: int) -> None:
        """Which rank failed first, with the end of its log; nothing more where rank 0 has explained bad input."""
        if not self.failed:
            self._say(f"srun ended with exit code {code}")
            return
        node, rank, how = self.failed[0]
        if code == UserError.exit_code and all(text.endswith(f"exit code {code}") for *_, text in self.failed):
            return
        path = log_path(self.folder, rank, self.start)
        self._say(f"rank {rank} on {node}: {how}; the other ranks are ended. The end of {path}:")
        if path.exists():
            print(tail(str(path)), file=sys.stderr, flush=True)

    def _requeue(self) -> int:
        job = os.environ.get("SLURM_ARRAY_JOB_ID", "")
        job = f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}" if job else os.environ["SLURM_JOB_ID"]
        if not self.settings.requeue:
            self._say("launch.requeue is false: submit again to go on")
            return 0
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"job {job} could not be requeued ({done.stderr.strip()}); submit again to go on")
        self._say("requeued")
        # Slurm ends this process; leaving first would count as the end of the job
        for _ in range(int(REQUEUE_WAIT / POLL)):
            time.sleep(POLL)
        raise RunError(f"job {job} was requeued {REQUEUE_WAIT:.0f} s ago and still runs")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def remember(number: int, frame: FrameType | None) -> None:
            self.reasons.append(number)

        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _say(self, text: str) -> None:
        print(f"luspo: {text}", file=sys.stderr, flush=True)


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        # a group of its own: what is sent to the batch script's group is passed on deliberately, once
        kept = {name: value for name, value in env.items() if name not in GPU_BINDING}
        return subprocess.Popen(list(command), env=kept, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, process_group=0)
    except OSError as error:
        raise UserError(f"srun cannot be started ({error}); is Slurm's client installed on this node?") from error


def _copy(source: IO[bytes] | None, targets: Sequence[IO[bytes]],
          notice: Callable[[bytes], None] | None) -> threading.Thread:
    """A thread that copies lines to the targets, and shows them to ``notice``."""
    assert source is not None

    def work() -> None:
        for line in source:
            if notice is not None:
                notice(line)
            for target in targets:
                with contextlib.suppress(OSError, ValueError):
                    target.write(line)
                    target.flush()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _end_ranks(srun: subprocess.Popen[bytes]) -> None:
    """All of them at once, by a signal that srun passes on and that no rank handles: SIGTERM is a request to stop to
    them, and what Slurm's own commands do begins with it."""
    srun.send_signal(signal.SIGUSR2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        srun.wait(10.0)
    _end(srun)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which srun passes to its tasks; SIGKILL for srun itself, whose step ends with the job."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
