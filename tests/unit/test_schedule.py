"""Batch plans: every sample once, equal counts, the budget, and results that do not depend on the layout."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luspo_megatron.algorithm.objectives import policy_objective
from luspo_megatron.data.collate import per_sequence, scatter
from luspo_megatron.data.schedule import build_mini_batches, plan_batches
from luspo_megatron.errors import UserError
from luspo_megatron.types import Sample

property_test = settings(max_examples=80, deadline=None, derandomize=True)
DEFAULTS = {
    "dp": 1, "prompts_per_mini_batch": 4, "epochs": 1, "max_tokens": 64, "multiple": 1, "seed": 0, "rollout_id": 0,
}  # fmt: skip
lengths_and_groups = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), min_size=1, max_size=60)


def plan(lengths, group_ids, **changes):
    arguments = {"response_lengths": [n // 2 for n in lengths], **DEFAULTS, **changes}
    return plan_batches(lengths, group_ids, **arguments)


@property_test
@given(
    pairs=lengths_and_groups,
    dp=st.integers(1, 5),
    per=st.integers(1, 6),
    epochs=st.integers(1, 3),
    max_tokens=st.integers(64, 200),
    multiple=st.sampled_from([1, 2, 4]),
    microbatch_multiple=st.sampled_from([1, 2, 4]),
)
def test_rules(pairs, dp, per, epochs, max_tokens, multiple, microbatch_multiple):
    lengths, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    plans = plan(lengths, groups, dp=dp, prompts_per_mini_batch=per, epochs=epochs, max_tokens=max_tokens,
                 multiple=multiple, microbatch_multiple=microbatch_multiple)  # fmt: skip
    per_epoch = -(-len(set(groups)) // per)
    assert len(plans) == epochs * per_epoch
    for epoch in range(epochs):
        seen = Counter(i for p in plans[epoch * per_epoch : (epoch + 1) * per_epoch] for i in p.sample_indices)
        assert seen == Counter(range(len(lengths)))
    for mini in plans:
        in_batch = {groups[i] for i in mini.sample_indices}
        assert 1 <= len(in_batch) <= per
        assert all(i in mini.sample_indices for i, g in enumerate(groups) if g in in_batch), "a group was torn apart"
        assert len(mini.ranks) == dp
        assert {len(rank) for rank in mini.ranks} == {mini.num_microbatches}
        assert mini.num_microbatches % microbatch_multiple == 0 and mini.num_microbatches > 0
        for rank in mini.ranks:
            for micro in rank:
                assert -(-sum(lengths[i] for i in micro) // multiple) * multiple <= max_tokens
        assert mini.global_num_sequences == len(mini.sample_indices)
        assert mini.global_num_tokens == sum(lengths[i] // 2 for i in mini.sample_indices)


@property_test
@given(pairs=lengths_and_groups, seed=st.integers(0, 9))
def test_composition_does_not_depend_on_the_layout(pairs, seed):
    lengths, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    layouts = [{"dp": 1}, {"dp": 2, "multiple": 2}, {"dp": 4, "max_tokens": 100}, {"dp": 3, "microbatch_multiple": 2}]
    compositions = []
    for layout in layouts:
        plans = plan(lengths, groups, epochs=2, seed=seed, **layout)
        compositions.append([(p.sample_indices, p.global_num_sequences, p.global_num_tokens) for p in plans])
    assert all(c == compositions[0] for c in compositions)


def test_order_follows_seed_rollout_and_epoch():
    lengths, groups = [8] * 64, [i // 2 for i in range(64)]

    def order(**changes):
        return [p.sample_indices for p in plan(lengths, groups, epochs=2, **changes)]

    base = order(seed=1, rollout_id=5)
    assert base == order(seed=1, rollout_id=5)
    assert base != order(seed=2, rollout_id=5) and base != order(seed=1, rollout_id=6)
    assert order(seed=1, rollout_id=2) != order(seed=2, rollout_id=1)
    assert base[:8] != base[8:], "the second epoch repeats the first"
    # the ids themselves count up over a run: the same positions with other ids
    assert order(seed=1, rollout_id=5) == [
        p.sample_indices for p in plan(lengths, [g + 1000 for g in groups], epochs=2, seed=1, rollout_id=5)
    ]


def rank_loads(mini, lengths):
    return np.array([[sum(lengths[i] for i in micro) for micro in rank] for rank in mini.ranks])


@pytest.mark.parametrize("dp", [2, 4])
def test_few_very_long_samples(dp):
    """Field case 9: skewed lengths under a token budget; equal counts on every rank."""
    lengths = [64, 60, 50] + [3, 5, 2, 4] * 10
    (mini,) = plan(lengths, list(range(43)), dp=dp, prompts_per_mini_batch=43)
    assert {len(rank) for rank in mini.ranks} == {mini.num_microbatches} and mini.num_microbatches > 1
    loads = rank_loads(mini, lengths)
    assert loads.sum() == sum(lengths) and loads.max() <= 64


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_balance(dp):
    """Lengths as rollouts have them (many short, a long tail up to the limit): rank totals are close, and so is each
    micro-batch over the ranks, which is what ranks that meet in every expert layer wait for."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(7.5, 0.8, 128).astype(int) + 50, 16384).tolist()
    (mini,) = plan(lengths, [i // 8 for i in range(128)], dp=dp, prompts_per_mini_batch=16, max_tokens=16384)
    loads = rank_loads(mini, lengths)
    assert loads.sum(1).max() < 1.05 * loads.sum(1).mean()
    assert loads.max(0).sum() < 1.05 * loads.mean(0).sum()


def test_few_micro_batches():
    """Balanced filling must not cost many more micro-batches than the tokens need."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 4000, 512).tolist()
    (mini,) = plan(lengths, [i // 8 for i in range(512)], dp=2, prompts_per_mini_batch=64, max_tokens=16384, multiple=8)
    assert mini.num_microbatches <= 1.1 * sum(lengths) / (2 * 16384) + 1


def test_fewer_samples_than_ranks():
    (mini,) = plan([5, 6], [0, 1], dp=4, multiple=2)
    assert mini.num_microbatches == 1 and sorted(map(len, (r[0] for r in mini.ranks))) == [0, 0, 1, 1]
    samples = make_samples([(2, 3), (3, 3)], [0, 1])
    tokens = [build_mini_batches([mini], samples, r, 2)[0].micro_batches[0].num_tokens for r in range(4)]
    assert sorted(tokens) == [2, 2, 6, 6]


def test_left_over_prompts_are_spread():
    sizes = [p.global_num_sequences for p in plan([4] * 17, list(range(17)), prompts_per_mini_batch=16)]
    assert sizes == [9, 8]
    assert [p.global_num_sequences for p in plan([4] * 12, list(range(12)))] == [4, 4, 4]


def test_too_long_sample():
    with pytest.raises(UserError, match=r"batch.max_tokens_per_micro_batch: sample 1 has 61 .* at least 64"):
        plan([8, 61, 9], [0, 1, 2], max_tokens=63, multiple=4)
    assert plan([8, 60, 9], [0, 1, 2], max_tokens=63, multiple=4)
    assert plan([], []) == []
    with pytest.raises(ValueError, match="dp"):
        plan([8], [0], dp=0)
    with pytest.raises(ValueError):
        plan([8, 9], [0])


# ---------------------------------------------------------------------------------- the plan, the pack and the loss


def make_samples(lengths, groups):
    rng = np.random.default_rng(7)
    return [
        Sample(
            group_id=g, sample_index=i, prompt_ids=rng.integers(0, 50, p).tolist(),
            response_ids=rng.integers(0, 50, r).tolist(), rollout_logprobs=rng.uniform(-3, -0.1, r).tolist(),
            finish_reason="stop", weight_version_start=0, weight_version_end=0,
        )
        for i, ((p, r), g) in enumerate(zip(lengths, groups, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["luspo", "gspo", "grpo", "drgrpo", "dapo", "cispo"])
def test_loss_is_the_same_in_every_layout(name):
    """Field case 3: 8 samples in 1, 2, 4, 8 micro-batches on DP 1, 2, 4: the same loss and per-token gradients."""
    lengths = [(2, 3), (4, 9), (3, 1), (2, 0), (1, 12), (5, 5), (2, 2), (3, 7)]
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    samples = make_samples(lengths, groups)
    rng = np.random.default_rng(3)
    new = [np.asarray(s.rollout_logprobs) + rng.normal(0, 0.01, len(s.response_ids)) for s in samples]
    advantages = [1.0, -0.5, 0.7, 2.0, -1.2, 0.4, -0.9, 1.1]

    def total(dp, max_tokens, multiple):
        plans = plan([p + r for p, r in lengths], groups, response_lengths=[r for _, r in lengths], dp=dp,
                     prompts_per_mini_batch=2, max_tokens=max_tokens, multiple=multiple)  # fmt: skip
        value, gradients, count = 0.0, {}, plans[0].num_microbatches
        for rank in range(dp):
            (mini,) = build_mini_batches(plans, samples, rank, multiple)
            for micro in mini.micro_batches:
                logprobs = torch.tensor(scatter(new, micro, np.float64), requires_grad=True)
                loss, _ = policy_objective(
                    name, logprobs=logprobs,
                    old_logprobs=torch.tensor(scatter([s.rollout_logprobs for s in samples], micro, np.float64)),
                    advantages=torch.tensor(per_sequence(advantages, micro)),
                    cu_seqlens=torch.tensor(micro.cu_seqlens), response_mask=torch.tensor(micro.response_mask),
                    clip_low=0.004, clip_high=0.005, global_num_sequences=mini.global_num_sequences,
                    global_num_tokens=mini.global_num_tokens, max_response_length=16,
                )  # fmt: skip
                loss.backward()
                value += loss.item()
                for i, index in enumerate(micro.sample_indices):
                    if index >= 0:
                        gradients[index] = logprobs.grad[micro.cu_seqlens[i] : micro.cu_seqlens[i + 1]]
        return value, torch.cat([gradients[i] for i in range(8)]), count * dp

    value, gradient, _ = total(1, 64, 1)
    assert abs(value) > 1e-4 and gradient.abs().max() > 1e-3
    counts = set()
    layouts = [(1, 32, 1), (1, 20, 2), (1, 13, 1), (2, 64, 4), (2, 20, 1), (4, 64, 1), (4, 16, 2)]
    for dp, max_tokens, multiple in layouts:
        other_value, other_gradient, count = total(dp, max_tokens, multiple)
        counts.add(count)
        assert other_value == pytest.approx(value, rel=1e-12)
        assert (other_gradient - gradient).abs().max() <= 1e-12 * gradient.abs().max()
    assert len(counts) > 3, counts
