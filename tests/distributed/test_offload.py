"""Offloading frees the trainer's memory (resident bytes of the process) and brings everything back bitwise.

Not covered: pinned host memory on CUDA.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.actor_jobs import Case, actor_of, shards, steps_of
from tests.tiny import config_of, samples_of, save_model
from tests.workers import pool


def cloned(parameter: Any) -> Any:
    return parameter.detach().clone()  # a storage that numpy has seen can no longer be emptied


def resident() -> int:
    import psutil
    import torch

    from luspo_megatron.actor.offload import release_free_memory

    gc.collect()
    release_free_memory(torch.device("cpu"))
    return int(psutil.Process().memory_info().rss)


def away_and_back(rank: int, case: Case, folder: Any, samples: Any, advantages: Any, dtype: str, leave: bool) -> Any:
    """A step, offload and onload (if `leave`), another step: memory by stage, parameters and losses at the end."""
    from luspo_megatron.actor.offload import ActorMemory

    with actor_of(rank, case, folder, dtype=dtype) as actor:
        steps_of(actor, samples, advantages, 0, 1)
        stages: dict[str, int] = {}
        memory = ActorMemory(actor)
        if leave:
            addresses = [p.data_ptr() for p in actor.gpt.parameters()]
            assert all(addresses)
            before = shards(actor, cloned)
            stages["full"] = resident()
            memory.offload_optimizer()
            stages["no optimizer"] = resident()
            for name, (_, _, values) in shards(actor, cloned).items():  # the sync reads them now
                np.testing.assert_array_equal(values, before[name][2])
            memory.offload_actor()
            memory.offload_actor()  # twice is once
            stages["nothing"] = resident()
            memory.onload()
            stages["back"] = resident()
        sizes = memory.nbytes()
        losses = steps_of(actor, samples, advantages, 1, 2)
        return {"stages": stages, "sizes": sizes, "losses": losses, "parameters": shards(actor, cloned)}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough (20 MB of parameters) that its memory is seen among the process's."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    config = config_of("moe", layers=2)
    config.hidden_size, config.moe_intermediate_size = 256, 320
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [Case(), Case(world=2, tp=2, ep=2), Case(world=2),
                                  Case(distributed_optimizer=False)], ids=["1", "tp2xep2", "dp2", "plain"])
def test_memory_falls_and_training_goes_on_as_if_nothing_had_been(case: Case, dtype: str, wide: Path) -> None:
    samples = samples_of(seed=2, groups=3, group_size=2)
    advantages = np.random.default_rng(0).normal(size=len(samples))
    jobs = (case, wide, samples, advantages, dtype)
    stayed = pool(case.world).run(away_and_back, *jobs, False)
    left = pool(case.world).run(away_and_back, *jobs, True)
    for one, other in zip(stayed, left, strict=True):
        assert one["losses"] == other["losses"]
        for name, (_, _, values) in one["parameters"].items():
            np.testing.assert_array_equal(other["parameters"][name][2], values, err_msg=name)
        stages, sizes = other["stages"], other["sizes"]
        assert min(sizes.values()) > 4e6, sizes
        # Adam keeps two fp32 numbers per parameter, bfloat16 also a master copy; split over data-parallel ranks
        freed = stages["full"] - stages["no optimizer"]
        assert freed > 0.9 * (sizes["optimizer"] + sizes["gradients"]), (stages, sizes)
        assert stages["no optimizer"] - stages["nothing"] > 0.9 * sizes["parameters"], (stages, sizes)
        assert abs(stages["back"] - stages["full"]) < 0.1 * sum(sizes.values()), (stages, sizes)


def test_a_reference_policy_has_parameters_only(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "dense")
    sizes = pool(1).run(reference_only, Case(), folder)[0]
    assert sizes["optimizer"] == sizes["gradients"] == 0 < sizes["parameters"]


def reference_only(rank: int, case: Case, folder: Any) -> Any:
    from luspo_megatron.actor.offload import ActorMemory

    with actor_of(rank, case, folder) as actor:
        actor.model, actor.optimizer = actor.gpt, None
        memory = ActorMemory(actor)
        before = shards(actor, cloned)
        memory.offload_optimizer()
        memory.offload_actor()
        memory.onload()
        for name, (_, _, values) in shards(actor, cloned).items():
            np.testing.assert_array_equal(values, before[name][2])
        return memory.nbytes()
