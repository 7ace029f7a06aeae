"""What the commands that train share: one rank's resources, opened in order and closed in reverse.

`start` runs a command on all ranks: in place under torchrun, srun or mpirun, in a Slurm allocation through srun, else
through the local launcher.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from luspo_megatron.config import (
    BatchConfig,
    Config,
    LaunchConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from luspo_megatron.config_checks import model_facts, resolve_layout
from luspo_megatron.config_io import load_config, save_config
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.folder_lock import alone_in
from luspo_megatron.launch import dry, environment, local, slurm, stop
from luspo_megatron.launch.end import end
from luspo_megatron.report.records import set_aside
from luspo_megatron.rollout.flag_check import check_engine_flags

LOCK_PATIENCE = 5.0  # seconds that the last start in a run folder gets to end


def start(module: str, config: Any, run_dir: str, world_size: int, run: Callable[[Any], None],
          check: Callable[[Any], None]) -> int:
    """Runs `run(config)` on every rank; returns the exit code of the command.

    `check(config)` comes first, in this process: whatever it refuses leaves the run folder as it is. The ranks read
    the configuration from a file outside the run folder; they save it there when they have found it good. A second
    start in the same run folder is kept out until the first has ended.
    """
    if local.under_launcher():
        environment.adopt()
        if os.environ["RANK"] == "0":  # under a launcher that is not ours nobody else keeps a second start out
            run = alone_in(run_dir, LOCK_PATIENCE)(run)
        return guarded(run, config)
    settings = getattr(config, "launch", LaunchConfig())
    by_slurm = slurm.wanted(settings)
    if dry.wanted():
        module = dry.__name__
        if isinstance(config, Config):
            print(f"dry run: {check_engine_flags(config)}", flush=True)
    else:
        check(config)
    if by_slurm:
        with alone_in(run_dir, slurm.REQUEUE_WAIT):  # a job that Slurm has taken back may still be ending
            return slurm.launch(module, config, world_size, run_dir, settings)
    with alone_in(run_dir, LOCK_PATIENCE), tempfile.TemporaryDirectory(prefix="luspo-") as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        return local.launch(module, str(path), world_size, run_dir)


def rank_main(config_class: type, run: Callable[[Any], None], argv: Sequence[str] | None = None) -> NoReturn:
    """One rank started by the local launcher, from its flags (`--config FILE`) to its end."""
    code = guarded(run, load_config(config_class, sys.argv[1:] if argv is None else argv), every_rank=True)
    if code:
        # At once: slow exit functions close sockets first, and the launcher would see others fail before us.
        sys.stdout.flush()
        os._exit(code)
    end(0)


def guarded(run: Callable[[Any], None], config: Any, *, every_rank: bool = False) -> int:
    """A person's mistake or a lost engine is one message and an exit code; our own errors propagate.

    Rank 0 gives the message; with `every_rank` the others too (into their logs, under the local launcher).
    """
    try:
        run(config)
    except (UserError, RunError) as error:
        if every_rank or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            print(f"luspo: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def save_settings(config: Any, run_dir: str | Path) -> Path:
    """<run_dir>/config.yaml, for the resume command. Another configuration that was there is kept as config.yaml.N."""
    path = Path(run_dir) / "config.yaml"
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".yaml.new")
    save_config(config, new)
    if path.is_file() and path.read_bytes() != new.read_bytes():
        set_aside(path)
    os.replace(new, path)
    return path


def resume_command(command: str, run_dir: str | Path) -> str:
    """What a person types to go on."""
    return f"luspo {command} --config {shlex.quote(str(Path(run_dir) / 'config.yaml'))}"


def quiet_libraries() -> None:
    """Keeps what megatron-core and torch say about themselves (deprecations, missing Apex) out of a person's screen."""
    import logging
    import warnings

    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def join_ranks(model: ModelConfig, parallel: ParallelConfig, seed: int) -> Any:
    """This process in the grid of `parallel`, all groups made."""
    quiet_libraries()
    from luspo_megatron.actor.groups import join

    layout = resolve_layout(parallel, model_facts(model))
    return join(layout, seed=seed, timeout_minutes=parallel.timeout_minutes)


def build_actor(ranks: Any, model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig,
                batch: BatchConfig, *, loss: LossConfig | None = None, temperature: float = 1.0, trainable: bool = True,
                weights: str | None = None) -> Any:
    """The actor with the weights of `weights` (a Hugging Face folder; empty: left as built; None: model.megatron, else
    model.hf)."""
    from luspo_megatron.actor import checkpoint
    from luspo_megatron.actor.actor import Actor
    from luspo_megatron.weights.architecture import read_architecture

    actor = Actor(read_architecture(model.hf, model.family), ranks, model=model, parallel=parallel,
                  optimizer=optimizer, batch=batch, loss=loss, temperature=temperature, trainable=trainable)
    folder = model.hf if weights is None else weights
    if weights is None and model.megatron:
        checkpoint.load_weights(actor, model.megatron)
    elif folder:
        actor.load_hf(folder)
    return actor


def lone_actor(checkpoint: Path) -> tuple[Any, ModelConfig]:
    """The policy of a checkpoint in this process alone, without an optimizer (TP = PP = EP = 1)."""
    import torch.distributed as dist

    from luspo_megatron.actor import checkpoint as checkpoints
    from luspo_megatron.actor.groups import join
    from luspo_megatron.parallel import ParallelLayout

    quiet_libraries()
    model = model_of(checkpoint)
    ranks = join(ParallelLayout(), seed=0, store=dist.HashStore(), rank=0)
    actor = build_actor(ranks, model, ParallelConfig(), OptimizerConfig(), BatchConfig(), trainable=False, weights="")
    checkpoints.load(actor, checkpoint, with_optimizer=False)
    return actor, model


def model_of(checkpoint: Path) -> ModelConfig:
    """What a checkpoint was trained from; its Hugging Face folder must still be there (config and tokenizer)."""
    from luspo_megatron.actor.checkpoint import read_state

    model = ModelConfig(**read_state(checkpoint)["model"])
    if not (Path(model.hf) / "config.json").is_file():
        raise UserError(f"{checkpoint}: the model that it was trained from, {model.hf}, is not there (no config.json); "
                        "put it back, or run the command where this path is right")
    return model


def stop_agreed(ranks: Any) -> bool:
    """Whether any rank was asked to stop; the same answer on all, so that they stop at the same step."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor(int(stop.requested()))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ranks.control)
    return bool(flag.item())


def checkpoints_of(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder itself, or the newest one of a run folder."""
    from luspo_megatron.actor.checkpoint import latest

    path = Path(path)
    if (path / "state.json").is_file():
        return path
    found = latest(checkpoints_of(path))
    if found is None:
        raise UserError(f"{path}: no complete checkpoint; give a run folder or a folder like checkpoints/step-000010")
    return found


def resume_from(run_dir: str, resume: bool) -> Path | None:
    """The checkpoint to go on from. Refuses to mix a new run into the checkpoints of an old one."""
    from luspo_megatron.actor.checkpoint import latest

    found = latest(checkpoints_of(run_dir))
    if found is not None and not resume:
        raise UserError(f"{run_dir} already holds {found.name}; use --run.resume true to go on, or another --run.dir")
    return found

