"""Reading Hugging Face folders: what is incomplete, of another shape or not there is named, never taken as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from luspo_megatron.errors import UserError
from luspo_megatron.weights.architecture import read_architecture
from luspo_megatron.weights.load import HfCheckpoint
from luspo_megatron.weights.table import WeightTable
from tests.tiny import save_model

EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(params=["moe", "dense-tied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind, _, tied = request.param.partition("-")
    return save_model(tmp_path / "model", kind, tied=bool(tied), layers=2)


def check(folder: Path) -> None:
    HfCheckpoint(folder).check(WeightTable(read_architecture(folder)))


def rewrite(folder: Path, change: Any) -> dict[str, torch.Tensor]:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return weights


def shard(folder: Path, parts: int = 2) -> dict[str, str]:
    """The single file as `parts` files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        own = dict(list(weights.items())[part::parts])
        save_file(own, folder / name)
        weight_map |= dict.fromkeys(own, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def problem(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check(folder)
    return str(caught.value)


def test_whole_and_sharded_folders_are_read(folder: Path) -> None:
    want = load_file(folder / "model.safetensors")
    check(folder)
    shard(folder)
    check(folder)
    read = HfCheckpoint(folder)
    assert read.names == set(want)
    for name, value in want.items():
        assert torch.equal(read[name], value)


def test_a_tied_head_that_is_there_all_the_same_is_fine_and_rotary_buffers_are(folder: Path) -> None:
    def add(weights: dict[str, torch.Tensor]) -> None:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)

    rewrite(folder, add)
    check(folder)


def test_missing_extra_and_wrong_tensors_are_all_named_at_once(folder: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.layers.0.self_attn.q_norm.weight"]
        weights["model.layers.7.input_layernorm.weight"] = torch.ones(64)
        weights["model.norm.weight"] = torch.ones(65)

    rewrite(folder, spoil)
    said = problem(folder)
    assert "missing: model.layers.0.self_attn.q_norm.weight" in said
    assert "unexpected: model.layers.7.input_layernorm.weight" in said
    assert "wrong shape: model.norm.weight (65,) instead of (64,)" in said


def test_a_deleted_shard_and_a_ghost_key_of_the_index(folder: Path) -> None:
    weight_map = shard(folder)
    ghost = sorted(weight_map)[3]
    path = folder / weight_map[ghost]
    weights = load_file(path)
    del weights[ghost]
    save_file(weights, path)
    assert f"missing: {ghost}" in problem(folder), "the index names it, the file has it not"
    path.unlink()
    assert f"files named by the index are missing: {path.name}" in problem(folder)


def test_a_dropped_expert_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "moe", layers=2)
    rewrite(folder, lambda weights: weights.pop(EXPERT))
    assert f"missing: {EXPERT}" in problem(folder)


def test_long_lists_are_cut_short(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "moe", layers=2)
    rewrite(folder, lambda weights: [weights.pop(name) for name in list(weights) if ".experts." in name])
    assert "and 43 more" in problem(folder) and len(problem(folder)) < 1000  # 2 x 8 x 3 tensors, five named
