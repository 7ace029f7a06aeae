"""Plans of the real models and of random layouts: every element exactly once, from the shard that holds it.

The reference for what a shard holds is `Layout.split` of tensors that hold their own element numbers; it knows nothing
of blocks. Real shapes are counted without tensors, by intervals.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.architecture import Architecture
from luspo_megatron.weights.layouts import Block
from luspo_megatron.weights.plan import Receivers, moves_of, plan_sync, stages_of
from luspo_megatron.weights.plan_report import count, describe
from luspo_megatron.weights.table import WeightTable

COMMON: dict[str, Any] = {"qk_norm": True, "family": "qwen3_moe", "vocab_size": 151936, "norm_eps": 1e-6,
                          "rope_theta": 1e6,
                          "max_positions": 40960, "tied": False, "num_experts": 128, "top_k": 8, "head_dim": 128,
                          "num_kv_heads": 4}
# config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B
QWEN_30B = Architecture(**COMMON, num_layers=48, hidden=2048, num_heads=32, ffn=6144, moe_ffn=768)
QWEN_235B = Architecture(**COMMON, num_layers=94, hidden=4096, num_heads=64, ffn=12288, moe_ffn=1536)
BUCKET = 512 * 2**20

REAL = [
    ("30B-tp4-ep8", QWEN_30B, ParallelLayout(8, tp=4, ep=8), 0, 30_532_122_624),
    ("30B-pp2-ep8", QWEN_30B, ParallelLayout(16, pp=2, ep=8), 0, 30_532_122_624),
    ("235B-tp4-pp4-ep16", QWEN_235B, ParallelLayout(128, tp=4, pp=4, ep=16), 22, 235_093_634_560),
]


@pytest.mark.parametrize(("arch", "layout", "last", "parameters"), [r[1:] for r in REAL], ids=[r[0] for r in REAL])
def test_real_models(arch: Architecture, layout: ParallelLayout, last: int, parameters: int) -> None:
    assert layout.violations() == []
    table = WeightTable(arch)
    stages = stages_of(arch.num_layers, layout.pp, last=last)
    for tp in (1, 2, 8):
        receivers = Receivers(engines=8 // tp, tp=tp)
        plan_sync.cache_clear()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.process_time()
        plan = plan_sync(table, layout, "bfloat16", BUCKET, receivers, stages)
        text = describe(plan, table, layout)
        seconds = time.process_time() - began
        assert seconds < 5, f"{seconds:.1f} s"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500e3, "weights were allocated"
        assert "8 workers" in text and f"{len(table.hf_shapes)} tensors" in text
    assert plan_sync(table, layout, "bfloat16", BUCKET, receivers, stages) is plan  # made once
    assert all(bucket.nbytes <= BUCKET for unit in plan.units for bucket in unit.buckets)
    manifest = plan.manifest(1)
    assert manifest.violations() == []  # each element exactly once, inside its bucket
    sent = {piece.name: piece.shape for bucket in manifest.buckets for piece in bucket.slices}
    assert sent == table.hf_shapes
    assert sum(prod(shape) for shape in sent.values()) == parameters  # the published number of parameters

    counts = count(plan, table)
    item = 2
    padding = counts.received - parameters * item
    assert 0 <= padding < 8 * counts.tensors
    # experts never cross a link between trainer ranks: each leaves the rank that owns it, whole
    experts = sum(prod(shape) for name, shape in sent.items() if ".experts." in name)
    for source, ranks in _expert_owners(plan, layout).items():
        assert ranks == {layout.expert_coordinate(source)["ep"]}
    dense = (parameters - experts) * item
    gathered = sum(counts.gathered.values())
    assert gathered <= dense * (layout.tp - 1) / layout.tp
    if layout.tp > 1:  # all but the replicated norms and routers, and the vocabulary's padding
        assert gathered > 0.95 * (dense - _replicated(table) * item) * (layout.tp - 1) / layout.tp
    per_ep_rank = experts * item / (layout.ep * layout.pp)
    assert all(nbytes > 0.7 * per_ep_rank for source, nbytes in counts.sent.items())
    if tp == 8:
        assert counts.kept < 1.05 * parameters * item / 8 + _replicated(table) * item


def _expert_owners(plan: Any, layout: ParallelLayout) -> dict[int, set[int]]:
    owners: dict[int, set[int]] = defaultdict(set)
    for unit in plan.units:
        if unit.is_expert:
            owners[unit.source].update(entry.expert // (128 // layout.ep) for entry in unit.entries)
    return owners


def _replicated(table: WeightTable) -> int:
    return sum(prod(shape) for name, shape in table.hf_shapes.items() if "norm" in name or "mlp.gate." in name)


def test_stages_even_interleaved_and_with_a_shorter_last_one() -> None:
    assert stages_of(4, 2) == (0, 0, 1, 1)
    assert stages_of(8, 2, vpp=2) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert [stages_of(94, 4, last=22).count(s) for s in range(4)] == [24, 24, 24, 22]
    with pytest.raises(ValueError, match="94 layers"):
        stages_of(94, 4)
    with pytest.raises(ValueError, match="uneven"):
        stages_of(94, 4, last=20)


def arch_of(layers: int, heads: int, kv: int, experts: int, vocab: int, tied: bool) -> Architecture:
    return Architecture("qwen3_moe" if experts else "qwen3", layers, 16, heads, kv, 6, 24, vocab, 1e-6, 1e4, 64, tied,
                        num_experts=experts, top_k=2 if experts else 0, moe_ffn=8 if experts else 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Architecture, ParallelLayout, int, int]:
    tp, pp, ep = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    moe = draw(st.booleans())
    if not moe:
        ep = 1
    etp = draw(st.sampled_from([1, 2, tp])) if moe else tp
    smallest = max(tp * pp, etp * ep * pp)
    world = smallest * draw(st.sampled_from([1, 2]))
    layout = ParallelLayout(world, tp, pp, ep, etp)
    vpp = draw(st.sampled_from([1, 2]))
    arch = arch_of(pp * vpp * draw(st.sampled_from([1, 2])), 8, draw(st.sampled_from([4, 8])), 4 if moe else 0,
                   draw(st.integers(5, 300)), draw(st.booleans()))
    return arch, layout, vpp, draw(st.integers(8, 6000))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_random_layouts_bring_every_element_to_its_place(case: tuple[Architecture, ParallelLayout, int, int]) -> None:
    arch, layout, vpp, bucket_bytes = case
    assert layout.violations() == []
    table = WeightTable(arch)
    stages = stages_of(arch.num_layers, layout.pp, vpp)
    plan = plan_sync(table, layout, "float64", bucket_bytes, stages=stages)
    assert plan.manifest(1).violations() == []
    numbers, start = {}, 0
    for name, shape in table.hf_shapes.items():  # each element is its own number
        numbers[name] = torch.arange(start, start + prod(shape), dtype=torch.float64).view(shape)
        start += prod(shape)
    arrived = {name: torch.full((prod(shape),), -1.0, dtype=torch.float64) for name, shape in table.hf_shapes.items()}
    for unit in plan.units:
        shards: dict[tuple[str, int], torch.Tensor] = {}
        for bucket in unit.buckets:
            assert bucket.source == unit.members[0] and bucket.nbytes <= max(bucket_bytes, 8)
            for move in moves_of(unit, bucket):
                _check_owner(move.entry, unit.members[move.member], move.member, layout, arch, stages)
                key = (move.entry.megatron, move.member)
                if key not in shards:
                    shards[key] = move.entry.row.layout.split(
                        [numbers[n] for n in move.entry.hf_names], len(unit.members), move.member).reshape(-1)
                target = arrived[move.piece.name][move.piece.start : move.piece.start + move.piece.numel]
                for k in range(move.block.count):
                    dst = move.block.dst + k * move.block.dst_stride
                    src = move.block.src + k * move.block.src_stride
                    assert (target[dst : dst + move.block.run] == -1).all(), "an element came twice"
                    target[dst : dst + move.block.run] = shards[key][src : src + move.block.run]
    for name, values in arrived.items():
        assert torch.equal(values, numbers[name].reshape(-1)), name


def _check_owner(entry: Any, rank: int, member: int, layout: ParallelLayout, arch: Architecture,
                 stages: tuple[int, ...]) -> None:
    dense, expert = layout.dense_coordinate(rank), layout.expert_coordinate(rank)
    if entry.row.per_layer:
        assert dense["pp"] == stages[entry.layer]
    if entry.row.per_expert:
        assert expert["ep"] == entry.expert // (arch.num_experts // layout.ep) and expert["etp"] == member
    else:
        assert dense["tp"] == member and dense["dp"] == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 5), st.integers(0, 4), st.integers(0, 60),
       st.integers(0, 60))
def test_clipped_blocks_are_the_block_inside_the_range(dst: int, run: int, count_: int, gap: int, a: int, b: int
                                                        ) -> None:
    block = Block(dst, 100, run, count_, run + gap, run + 2 * gap)

    def elements(one: Block) -> list[tuple[int, int]]:
        return [(one.dst + k * one.dst_stride + i, one.src + k * one.src_stride + i)
                for k in range(one.count) for i in range(one.run)]

    low, high = min(a, b), max(a, b)
    found = sorted(pair for part in block.clip(low, high) for pair in elements(part))
    assert found == sorted(pair for pair in elements(block) if low <= pair[0] < high)
