"""The weight table and its layouts: names against what transformers writes, cuts against explicit loops.

The layouts as megatron understands them are tested where megatron runs (tests/distributed).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from luspo_megatron.weights.architecture import padded_vocab, read_architecture
from luspo_megatron.weights.layouts import FusedQKV, GateUp, Replicated, Sharded, Vocab
from luspo_megatron.weights.table import WeightTable
from tests.tiny import VOCAB, save_model


@pytest.fixture(scope="module", params=[("dense", False), ("dense", True), ("moe", False), ("moe", True)],
                ids=["dense", "dense-tied", "moe", "moe-tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, tied = request.param
    return save_model(tmp_path_factory.mktemp("model"), kind, tied=tied, layers=2)


def test_names_and_shapes_are_those_on_disk(folder: Path) -> None:
    table = WeightTable(read_architecture(folder))
    on_disk = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            on_disk |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert table.hf_shapes == on_disk


@pytest.mark.parametrize("size", [1, 2])
def test_every_row_is_cut_and_put_together_again(folder: Path, size: int) -> None:
    table = WeightTable(read_architecture(folder))
    for row in table.rows:
        tensors = [torch.randn(shape) for shape in row.shapes]
        shards = [row.layout.split(tensors, size, rank) for rank in range(size)]
        assert {tuple(shard.shape) for shard in shards} == {row.layout.shard_shape(row.shapes, size)}
        merged = row.layout.merge(shards)
        assert len(merged) == len(tensors)
        for got, want in zip(merged, tensors, strict=True):
            assert torch.equal(got, want), row.megatron


# the last three have fewer key-value heads than some of the sizes: a cut falls inside a group
LAYOUTS = [(Replicated(), [(5, 3)]), (Sharded(0), [(8, 3)]), (Sharded(1), [(3, 8)]), (GateUp(), [(8, 3), (8, 3)]),
           (Vocab(VOCAB), [(VOCAB, 3)]), (FusedQKV(4, 5), [(40, 3), (20, 3), (20, 3)]),
           (FusedQKV(4, 5), [(40,), (20,), (20,)]),
           (FusedQKV(2, 4), [(32, 3), (8, 3), (8, 3)]), (FusedQKV(1, 4), [(16, 3), (4, 3), (4, 3)]),
           (FusedQKV(2, 6), [(48,), (12,), (12,)])]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("layout", "shapes"), LAYOUTS, ids=str)
def test_each_layout_by_itself_over_more_ranks(layout: Any, shapes: list[Any], size: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    shards = [layout.split(tensors, size, rank) for rank in range(size)]
    assert {tuple(shard.shape) for shard in shards} == {layout.shard_shape(shapes, size)}
    merged = layout.merge(shards)
    assert all(torch.equal(got, want) for got, want in zip(merged, tensors, strict=True)), layout


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("layout", "shapes"), LAYOUTS, ids=str)
def test_blocks_say_in_numbers_what_split_does(layout: Any, shapes: list[Any], size: int) -> None:
    """Every element of a tensor from the place in a shard where `split` has put it, each exactly once."""
    tensors = [torch.randn(shape) for shape in shapes]
    shards = [layout.split(tensors, size, rank).flatten() for rank in range(size)]
    for index, tensor in enumerate(tensors):
        built, count = torch.zeros(tensor.numel()), torch.zeros(tensor.numel(), dtype=torch.int)
        for rank, block in layout.blocks(index, shapes, size):
            for k in range(block.count):
                dst, src = block.dst + k * block.dst_stride, block.src + k * block.src_stride
                built[dst : dst + block.run] = shards[rank][src : src + block.run]
                count[dst : dst + block.run] += 1
        assert count.eq(1).all() and torch.equal(built.view(tensor.shape), tensor)


def test_the_fused_attention_rows_stand_by_key_value_group() -> None:
    """4 query heads, 2 groups, head_dim 3: group g is queries 2g and 2g + 1, then key g, then value g."""
    q, k, v = torch.arange(12.0)[:, None], 100 + torch.arange(6.0)[:, None], 200 + torch.arange(6.0)[:, None]
    fused = FusedQKV(num_kv_heads=2, head_dim=3)
    want = [0, 1, 2, 3, 4, 5, 100, 101, 102, 200, 201, 202, 6, 7, 8, 9, 10, 11, 103, 104, 105, 203, 204, 205]
    assert fused.split([q, k, v], 1, 0)[:, 0].tolist() == want
    assert fused.split([q, k, v], 2, 1)[:, 0].tolist() == want[12:]
    assert fused.split([q, k, v], 4, 1)[:, 0].tolist() == want[6:12]  # half a group per rank


def test_gate_stands_over_up_on_each_rank() -> None:
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    assert GateUp().split([gate, up], 2, 1)[:, 0].tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize(("vocab", "tp"), [(301, 1), (301, 2), (301, 4), (128, 2), (151936, 8), (80, 3)])
def test_padded_rows_of_the_vocabulary_are_zero_and_few(vocab: int, tp: int) -> None:
    rows = padded_vocab(vocab, tp)
    assert rows % tp == 0 and vocab <= rows < vocab + max(128, 128 * tp)
    embedding = torch.ones(vocab, 2)
    shards = [Vocab(vocab).split([embedding], tp, rank) for rank in range(tp)]
    whole = torch.cat(shards)
    assert whole.shape == (rows, 2) and whole[:vocab].eq(1).all() and whole[vocab:].eq(0).all()


def test_what_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="18 does not divide over 4"):
        FusedQKV(2, 3).split([torch.zeros(6, 1)] * 3, 4, 0)
    with pytest.raises(ValueError, match="9 does not divide over 2"):
        Sharded(1).split([torch.zeros(3, 9)], 2, 0)


def test_local_names_are_found_with_their_global_numbers(folder: Path) -> None:
    table = WeightTable(read_architecture(folder))
    for entry in table.entries():
        found = table.find(entry.megatron)
        assert found == entry
    late = table.find("decoder.layers.0.self_attention.linear_qkv.weight", layer_offset=1)
    assert late.layer == 1 and late.hf_names[0] == "model.layers.1.self_attn.q_proj.weight"
    # the Transformer Engine spec keeps the norm inside the next linear layer
    fused = table.find("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight")
    assert fused.hf_names == ("model.layers.1.input_layernorm.weight",)
    if table.arch.is_moe:
        expert = table.find("decoder.layers.1.mlp.experts.linear_fc2.weight1", expert_offset=4)
        assert expert.hf_names == ("model.layers.1.mlp.experts.5.down_proj.weight",)
    with pytest.raises(KeyError, match="no row of the weight table describes decoder.layers.0.mlp.bias"):
        table.find("decoder.layers.0.mlp.bias")
