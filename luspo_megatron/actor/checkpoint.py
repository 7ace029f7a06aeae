"""Checkpoints: torch_dist files that load under any layout, RNG of every rank, and the run's own state.

    <folder>/step-000010/           complete, or absent: written as step-000010.partial and renamed
        dist/                       model and optimizer (megatron.core.dist_checkpointing)
        rng/rank-0.pt ...           RNG of each rank, restored when the layout is the same
        state.json                  step, updates, weight version, controller state, layout

Keys do not depend on the layer spec (platform/modules.py) or on the layout.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from luspo_megatron.actor.actor import Actor
from luspo_megatron.errors import UserError

OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
                      "singleton_local_shards": False}

EXTRA_STATE = "_extra_state"


def step_folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step-{step:06d}"


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = sorted(p for p in Path(folder).glob("step-??????") if (p / "state.json").is_file())
    return found[-1] if found else None


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    path = Path(checkpoint) / "state.json"
    if not path.is_file():
        raise UserError(f"{checkpoint}: not a complete checkpoint (no state.json); give a folder like step-000010")
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def save(actor: Actor, folder: str | Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Saves on all ranks; `state` (JSON data, rank 0's is written) is returned by `read_state`."""
    from megatron.core import dist_checkpointing

    ranks = actor.ranks
    final = step_folder(folder, step)
    partial = final.with_name(final.name + ".partial")
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "dist").mkdir(parents=True)
        (partial / "rng").mkdir()
    ranks.broadcast(None)
    model, optimizer = sharded_state(actor, is_loading=False)
    dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(partial / "dist"),
                            content_metadata=OPTIMIZER_METADATA)
    torch.save(_rng_state(), partial / "rng" / f"rank-{ranks.rank}.pt")
    ranks.broadcast(None)
    if ranks.rank == 0:
        own = {"step": step, "layout": vars(ranks.layout), "architecture": asdict(actor.arch)}
        (partial / "state.json").write_text(json.dumps({**state, **own}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        _prune(Path(folder), keep)
    ranks.broadcast(None)
    return final


def load(actor: Actor, checkpoint: str | Path, *, with_optimizer: bool = True) -> dict[str, Any]:
    """Restores the actor on all ranks, under this run's layout, and returns the state.

    UserError for a checkpoint of another model.
    """
    checkpoint = Path(checkpoint)
    state = read_state(checkpoint)
    want = asdict(actor.arch)
    have = state.get("architecture", want)
    if differing := [f"{key} {have.get(key)} instead of {want[key]}" for key in want if have.get(key) != want[key]]:
        raise UserError(f"{checkpoint} is of another model than model.hf: {', '.join(differing)}; use the model that "
                        "it was trained from, or another run.dir")
    _load_dist(actor, checkpoint / "dist", with_optimizer=with_optimizer and actor.optimizer is not None)
    rng = checkpoint / "rng" / f"rank-{actor.ranks.rank}.pt"
    if state["layout"] == vars(actor.ranks.layout) and rng.is_file():
        _restore_rng(torch.load(rng, weights_only=False))
    return state


def load_weights(actor: Actor, folder: str | Path) -> None:
    """Only the model, on all ranks, from a checkpoint, a converted folder, or a bare torch_dist folder."""
    _load_dist(actor, dist_folder(folder), with_optimizer=False)
    if actor.optimizer is not None:
        actor.optimizer.reload_model_params()


def dist_folder(folder: str | Path) -> Path:
    """The torch_dist folder of model.megatron. UserError where it is none of the three above."""
    for found in (Path(folder) / "dist", Path(folder)):
        if (found / ".metadata").is_file():
            return found
    raise UserError(f"model.megatron {folder}: not a Megatron checkpoint (no dist/.metadata); give a folder that "
                    "tools/checkpoint_convert/hf_to_megatron.py wrote, or one like checkpoints/step-000010")


def _load_dist(actor: Actor, folder: Path, *, with_optimizer: bool) -> None:
    from megatron.core import dist_checkpointing

    model, optimizer = sharded_state(actor, is_loading=True, with_optimizer=with_optimizer)
    wanted = {"model": model, **({"optimizer": optimizer} if with_optimizer else {})}
    loaded = dist_checkpointing.load(wanted, str(folder))
    missing, unexpected = actor.gpt.load_state_dict(loaded["model"], strict=False)
    if wrong := [name for name in (*missing, *unexpected) if not name.endswith(EXTRA_STATE)]:
        raise RuntimeError(f"{folder}: parameters not restored: {', '.join(wrong[:5])}")
    if with_optimizer:
        actor.optimizer.load_state_dict(loaded["optimizer"])


def sharded_state(actor: Actor, *, is_loading: bool, with_optimizer: bool = True) -> tuple[Any, Any]:
    """Megatron's sharded state dicts of the model and (or None) the optimizer."""
    # of the unwrapped model: DDP would prefix every key
    # extra states are fp8 scales of Transformer Engine, which only some layer specs have
    model = {k: v for k, v in actor.gpt.sharded_state_dict().items() if not k.endswith(EXTRA_STATE)}
    if not with_optimizer:
        return model, None
    optimizer = actor.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=OPTIMIZER_METADATA)
    return model, optimizer


def _prune(folder: Path, keep: int) -> None:
    complete = sorted(p for p in folder.glob("step-??????") if (p / "state.json").is_file())
    for old in complete[: -max(1, keep)]:
        shutil.rmtree(old)


def _rng_state() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}


def _restore_rng(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
