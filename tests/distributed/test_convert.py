"""Converted checkpoints and the actor: loaded with megatron-core under other layouts, and made from live training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from luspo_megatron.convert.commands import verify
from luspo_megatron.convert.to_hf import convert as to_hf
from luspo_megatron.convert.to_megatron import Layout, convert
from luspo_megatron.weights.architecture import read_architecture
from luspo_megatron.weights.table import WeightTable
from tests.convert_helpers import make_hf, same_bits, tensors_of
from tests.distributed.actor_jobs import Case, assemble, save_after
from tests.distributed.convert_jobs import greedy_choices, weights_twice
from tests.tiny import samples_of, save_model
from tests.workers import pool

SAVED = Layout(tp=2, pp=2, ep=2, etp=1)
LOADED = {
    "moe": [Case(), Case(world=4, tp=2, pp=2, ep=2), Case(world=4, tp=2, ep=2, etp=2), Case(world=4, ep=4),
            Case(world=2, pp=2)],
    "dense": [Case(), Case(world=4, tp=2, pp=2), Case(world=4, pp=4)],
    "qwen2": [Case(), Case(world=2, tp=2)], "llama": [Case(world=2, tp=2), Case(world=2, pp=2)],
    "mistral": [Case(), Case(world=4, tp=2, pp=2)],
}


@pytest.mark.parametrize("kind", LOADED)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loads_under_other_layouts(kind: str, tied: bool, tmp_path: Path) -> None:
    """Every shard is bit for bit what the actor reads from the Hugging Face folder itself."""
    hf = make_hf(tmp_path / "hf", kind, tied=tied, files=2)
    convert(hf, tmp_path / "out", SAVED if kind == "moe" else Layout(tp=2, pp=2), workers=1, quiet=True)
    for case in LOADED[kind]:
        for first, second in pool(case.world).run(weights_twice, case, hf, tmp_path / "out"):
            assert first.keys() == second.keys() and first
            for name in first:
                assert first[name][:2] == second[name][:2]
                np.testing.assert_array_equal(first[name][2], second[name][2], err_msg=f"{case.layout} {name}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two updates at TP2 PP2 EP2 with the distributed optimizer, then a checkpoint."""
    folder = save_model(tmp_path_factory.mktemp("model"), "moe")
    samples = samples_of(seed=3, groups=2, group_size=4)
    advantages = np.random.default_rng(0).normal(size=len(samples))
    out = tmp_path_factory.mktemp("checkpoints")
    case = Case(world=4, tp=2, pp=2, ep=2)
    results = pool(4).run(save_after, case, folder, samples, advantages, out, 2, 2)
    to_hf(out / "step-000002", out / "hf", hf_config=folder, shard_bytes=300_000, workers=1, quiet=True)
    return folder, out / "step-000002", out / "hf", results


def test_a_training_checkpoint_becomes_a_model(trained: Any, tmp_path: Path) -> None:
    """The exported tensors are the trained parameters bit for bit, and survive the way back."""
    folder, checkpoint, hf, results = trained
    table = WeightTable(read_architecture(folder))
    want = {name: torch.from_numpy(value) for name, value in assemble(results, "parameters", table).items()}
    same_bits(tensors_of(hf), {name: want[name] for name in tensors_of(hf)})
    assert any(not torch.equal(want[name], t) for name, t in tensors_of(folder).items() if name in want)
    convert(hf, tmp_path / "again", SAVED, workers=1, quiet=True)
    assert verify([str(checkpoint), str(tmp_path / "again"), "--hf-config", str(folder), "--quiet"]) == 0


def test_the_exported_model_generates_what_the_actor_would(trained: Any) -> None:
    """transformers' greedy tokens are the actor's own first choice at every position."""
    from transformers import AutoModelForCausalLM

    folder, checkpoint, hf, _ = trained
    model = AutoModelForCausalLM.from_pretrained(hf)
    prompts = [[5, 9, 200, 33], [17, 2], [44, 45, 46, 47, 48, 49]]
    sequences = [model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24, eos_token_id=None,
                                pad_token_id=0)[0].tolist() for ids in prompts]
    [choices] = pool(1).run(greedy_choices, folder, checkpoint, sequences)
    for ids, sequence, choice in zip(prompts, sequences, choices, strict=True):
        assert len(sequence) == len(ids) + 24
        assert choice[len(ids) - 1 : -1] == sequence[len(ids) :]
