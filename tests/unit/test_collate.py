"""Packing against explicit loops over the unpacked samples."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luspo_megatron.data.collate import filler, pack, per_sequence, scatter, unpack
from luspo_megatron.errors import UserError
from luspo_megatron.types import Sample

sample_lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1, max_size=8)
property_test = settings(max_examples=60, deadline=None, derandomize=True)


def make_samples(lengths, vocabulary=11):
    """Ids include 0, which is also the padding id; log-probs name their token."""
    rng = np.random.default_rng(len(lengths))
    return [
        Sample(
            group_id=i, sample_index=0, prompt_ids=rng.integers(0, vocabulary, p).tolist(),
            response_ids=rng.integers(0, vocabulary, r).tolist(),
            rollout_logprobs=[-(i + 1) - k / 16 for k in range(r)],
            finish_reason="stop", weight_version_start=0, weight_version_end=0,
        )
        for i, (p, r) in enumerate(lengths)
    ]  # fmt: skip


def test_one_pack_by_hand():
    samples = [
        SimpleNamespace(prompt_ids=[5, 6], response_ids=[0, 8], rollout_logprobs=[-1.0, -2.0]),
        SimpleNamespace(prompt_ids=[9], response_ids=[], rollout_logprobs=[]),
        SimpleNamespace(prompt_ids=[1], response_ids=[2], rollout_logprobs=[-3.0]),
    ]
    batch = pack(samples, [2, 0, 1], 4)
    assert batch.token_ids.tolist() == [1, 2, 5, 6, 0, 8, 9, 0]
    assert batch.targets.tolist() == [2, 0, 6, 0, 8, 0, 0, 0]
    assert batch.response_mask.tolist() == [True, False, False, True, True, False, False, False]
    assert batch.rollout_logprobs.tolist() == [-3, 0, 0, -1, -2, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 6, 7, 8]
    assert batch.sample_indices.tolist() == [2, 0, 1, -1]
    assert (batch.num_tokens, batch.num_sequences) == (8, 4)
    assert batch.cu_seqlens.dtype == np.int32 and batch.rollout_logprobs.dtype == np.float32
    assert batch.token_ids.dtype == batch.targets.dtype == batch.sample_indices.dtype == np.int64


def test_shift_inside_each_sequence():
    """Field case 8: logits coded by position, three packed sequences; the log-prob of response token k of a sample is
    read at the position before it, and no label comes from the next sequence."""
    lengths = [(3, 4), (1, 2), (2, 5)]
    samples = make_samples(lengths)
    batch = pack(samples, [0, 1, 2], 8)
    logits = np.sin(1 + np.arange(batch.num_tokens)[:, None] * 3.7 + np.arange(11)[None] * 1.3)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    actual = unpack(logprobs[np.arange(batch.num_tokens), batch.targets], batch)
    start = 0
    for sample, got, (p, r) in zip(samples, actual, lengths, strict=True):
        expected = [logprobs[start + p - 1 + k, sample.response_ids[k]] for k in range(r)]
        rolled = [logprobs[start + p + k, sample.response_ids[k]] for k in range(r)]
        assert got.tolist() == expected and got.tolist() != rolled
        start += p + r


@property_test
@given(lengths=sample_lengths, multiple=st.integers(1, 9), order=st.randoms(use_true_random=False))
def test_round_trip(lengths, multiple, order):
    samples = make_samples(lengths)
    indices = list(range(len(samples)))
    order.shuffle(indices)
    batch = pack(samples, indices, multiple)
    total = sum(p + r for p, r in lengths)
    assert batch.num_tokens % multiple == 0 and 0 <= batch.num_tokens - total < multiple
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == batch.num_tokens
    assert (np.diff(batch.cu_seqlens) > 0).all()
    assert batch.sample_indices.tolist() == indices + [-1] * (batch.num_tokens > total)
    assert batch.response_mask.sum() == sum(r for _, r in lengths)
    for values, key in ((batch.targets, "response_ids"), (batch.rollout_logprobs, "rollout_logprobs")):
        assert [x.tolist() for x in unpack(values, batch)] == [getattr(samples[i], key) for i in indices]
    restored = scatter([s.rollout_logprobs for s in samples], batch)
    assert np.array_equal(restored, batch.rollout_logprobs) and restored.dtype == np.float32
    advantages = per_sequence([i + 0.5 for i in range(len(samples))], batch)
    assert advantages.tolist() == [i + 0.5 for i in indices] + [0.0] * (batch.num_tokens > total)


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_filler(multiple):
    batch = filler(multiple)
    assert batch.num_tokens == multiple and batch.cu_seqlens.tolist() == [0, multiple]
    assert batch.sample_indices.tolist() == [-1] and not batch.response_mask.any()
    assert unpack(np.zeros(multiple), batch) == [] and per_sequence([1.0], batch).tolist() == [0]


def test_refusals():
    def sample(prompt, response, logprobs):
        return SimpleNamespace(prompt_ids=prompt, response_ids=response, rollout_logprobs=logprobs)

    with pytest.raises(UserError, match="sample 1"):
        pack([sample([1], [2], [0.0]), sample([], [1], [0.0])], [0, 1])
    with pytest.raises(ValueError, match="2 response tokens but 1"):
        pack([sample([1], [2, 3], [0.0])], [0])
    batch = pack([sample([1], [2, 3], [0.0, 0.0])], [0])
    with pytest.raises(ValueError):
        unpack(np.zeros(batch.num_tokens + 1), batch)
    with pytest.raises(ValueError, match="sample 0"):
        scatter([[1.0]], batch)
    with pytest.raises(ValueError):
        filler(0)
