"""The plan of a weight push, without processes: every element once, from a rank that owns it, in bounded buckets.

Ownership is worked out here from each rank's coordinates (who holds which layer and expert), not from the plan's own
formulas. Not covered: the gathers themselves (tests/distributed/test_gather.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.architecture import Architecture
from luspo_megatron.weights.gather import fill_bucket
from luspo_megatron.weights.manifest import ITEM_SIZES, Manifest
from luspo_megatron.weights.plan import SyncPlan, plan_sync
from luspo_megatron.weights.table import Entry, WeightTable

DENSE = Architecture(family="qwen3", num_layers=4, hidden=8, num_heads=4, num_kv_heads=2, head_dim=6, ffn=12,
                     vocab_size=19, norm_eps=1e-6, rope_theta=1e4, max_positions=64, tied=False)
MOE = replace(DENSE, family="qwen3_moe", num_experts=4, top_k=2, moe_ffn=10)
ARCHITECTURES = {"dense": DENSE, "dense-tied": replace(DENSE, tied=True), "moe": MOE,
                 "moe-tied": replace(MOE, tied=True)}


@st.composite
def layouts(draw: st.DrawFn, moe: bool) -> ParallelLayout:
    tp, pp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([1, 2, 4])) if moe else 1
    etp = draw(st.sampled_from([1, 2])) if moe else tp
    world = pp * math.lcm(tp, etp * ep) * draw(st.sampled_from([1, 2]))
    layout = ParallelLayout(world, tp, pp, ep, etp)
    assert layout.violations() == []
    return layout


@st.composite
def cases(draw: st.DrawFn) -> tuple[WeightTable, ParallelLayout, str, int]:
    arch = ARCHITECTURES[draw(st.sampled_from(sorted(ARCHITECTURES)))]
    return (WeightTable(arch), draw(layouts(arch.is_moe)), draw(st.sampled_from(["float32", "bfloat16"])),
            draw(st.integers(8, 1500) | st.just(10**9)))


def owners(entry: Entry, arch: Architecture, layout: ParallelLayout) -> dict[int, int]:
    """rank -> which shard of the entry it holds, over all ranks, from the ranks' coordinates."""
    out = {}
    for rank in range(layout.world_size):
        dense, expert = layout.dense_coordinate(rank), layout.expert_coordinate(rank)
        layers = arch.num_layers // layout.pp
        stage = dense["pp"]
        if entry.row.per_layer:
            here = stage * layers <= entry.layer < (stage + 1) * layers
        else:
            here = stage == (0 if "embedding" in entry.megatron else layout.pp - 1)
        if entry.row.per_expert:
            count = arch.num_experts // layout.ep
            here &= expert["ep"] * count <= entry.expert < (expert["ep"] + 1) * count
        if here:
            out[rank] = expert["etp"] if entry.row.per_expert else dense["tp"]
    return out


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_element_travels_once_in_bounded_buckets(case: tuple[WeightTable, ParallelLayout, str, int]) -> None:
    table, layout, dtype, bucket_bytes = case
    plan = plan_sync(table, layout, dtype, bucket_bytes)
    sent = {name: np.zeros(math.prod(shape), int) for name, shape in table.hf_shapes.items()}
    for unit in plan.units:
        for bucket in unit.buckets:
            assert bucket.source == unit.source and 0 < bucket.nbytes <= bucket_bytes
            used = np.zeros(bucket.nbytes, int)
            for piece in bucket.slices:
                assert piece.dtype == dtype and piece.shape == table.hf_shapes[piece.name] and piece.numel > 0
                assert piece.offset % ITEM_SIZES[dtype] == 0
                used[piece.offset : piece.offset + piece.numel * ITEM_SIZES[dtype]] += 1
                sent[piece.name][piece.start : piece.start + piece.numel] += 1
            assert used.max() == 1
    assert all((count == 1).all() for count in sent.values())
    assert plan.manifest(3).violations() == []
    assert Manifest.from_dict(plan.manifest(3).to_dict()) == plan.manifest(3)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_sources_own_what_they_send(case: tuple[WeightTable, ParallelLayout, str, int]) -> None:
    table, layout, dtype, bucket_bytes = case
    plan = plan_sync(table, layout, dtype, bucket_bytes)
    entries = [entry for unit in plan.units for entry in unit.entries]
    assert sorted(e.megatron for e in entries) == sorted(e.megatron for e in table.entries())
    for unit in plan.units:
        names = {piece.name for bucket in unit.buckets for piece in bucket.slices}
        assert names == {name for entry in unit.entries for name in entry.hf_names}
        for entry in unit.entries:
            held = owners(entry, table.arch, layout)
            assert [held.get(rank) for rank in unit.members] == list(range(len(unit.members)))
            assert len(unit.members) == (layout.etp if entry.row.per_expert else layout.tp)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_plan_is_a_function_of_its_arguments(case: tuple[WeightTable, ParallelLayout, str, int]) -> None:
    table, layout, dtype, bucket_bytes = case
    assert plan_sync(table, layout, dtype, bucket_bytes) == \
        plan_sync(WeightTable(table.arch), replace(layout), dtype, bucket_bytes)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_tensors_are_reassembled_bitwise(case: tuple[WeightTable, ParallelLayout, str, int]) -> None:
    """Also those larger than a bucket, out of one buffer that every bucket overwrites."""
    table, layout, dtype, bucket_bytes = case
    element = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    want = {name: torch.randn(shape, generator=generator).to(element) for name, shape in table.hf_shapes.items()}
    got = {name: torch.full_like(value, float("nan")).flatten() for name, value in want.items()}
    plan = plan_sync(table, layout, dtype, bucket_bytes)
    space = torch.zeros(max(b.nbytes for u in plan.units for b in u.buckets), dtype=torch.uint8)
    for unit in plan.units:
        tensors = {name: want[name] for entry in unit.entries for name in entry.hf_names}
        for bucket in unit.buckets:
            buffer = space[: bucket.nbytes]
            fill_bucket(buffer, tensors, bucket.slices)
            for piece in bucket.slices:
                values = buffer[piece.offset : piece.offset + piece.nbytes].view(element)
                got[piece.name][piece.start : piece.start + piece.numel] = values
    for name, value in want.items():
        assert torch.equal(got[name].view(value.shape), value), name


def largest_pieces(plan: SyncPlan, name: str) -> list[int]:
    return [p.numel for u in plan.units for b in u.buckets for p in b.slices if p.name == name]


def test_a_tensor_larger_than_a_bucket_is_cut_and_a_smaller_one_is_not() -> None:
    table = WeightTable(MOE)
    plan = plan_sync(table, ParallelLayout(2, tp=2, ep=2), "float32", 256)
    assert largest_pieces(plan, "lm_head.weight") == [64, 64, 24]  # 19 x 8 elements, 64 fit
    assert largest_pieces(plan, "model.norm.weight") == [8]
    whole = plan_sync(table, ParallelLayout(2, tp=2, ep=2), "float32", 4 * 19 * 8)
    for name, shape in table.hf_shapes.items():
        assert largest_pieces(whole, name) == [math.prod(shape)]


def test_experts_come_from_the_ranks_that_hold_them() -> None:
    """EP = 4 on four ranks: each sends its own expert of each layer, so no rank sends more than its part."""
    table = WeightTable(MOE)
    plan = plan_sync(table, ParallelLayout(4, ep=4), "float32", 10**6)
    for unit in plan.units:
        if unit.is_expert:
            assert {entry.expert for entry in unit.entries} == {unit.source}
    assert plan.sources == (0, 1, 2, 3)


def test_tied_models_send_the_embedding_once_and_no_head() -> None:
    for name in ("dense-tied", "moe-tied"):
        table = WeightTable(ARCHITECTURES[name])
        plan = plan_sync(table, ParallelLayout(2, pp=2), "float32", 10**6)
        names = [p.name for u in plan.units for b in u.buckets for p in b.slices]
        assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


def test_a_bucket_that_holds_no_element_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=4 cannot hold one element"):
        plan_sync(WeightTable(MOE), ParallelLayout(), "float32", 4)
