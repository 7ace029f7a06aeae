"""Log-probs and entropy of the loss stage in one process, against log_softmax in float64.

Vocabulary-parallel and sequence-parallel heads are compared with transformers in tests/distributed/test_layouts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs

T, H, V, PADDED = 23, 16, 301, 384


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [T, h], weight [padded V, h] (rows of padding that would win every softmax), targets [T], rows [T]"""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64) / 4
    weight[V:] = 100.0
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[0], targets[1] = 0, V - 1
    rows = torch.rand(T, generator=generator) < 0.7
    rows[:2] = True
    # every dtype starts from the same numbers
    hidden, weight = hidden.to(torch.bfloat16), weight.to(torch.bfloat16)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, rows


def reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor,
              temperature: float) -> tuple[Any, ...]:
    """(log-probs [R], entropy [R], hidden, weight) in float64 with gradients."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logp = torch.log_softmax((hidden @ weight[:V].t() / temperature)[rows], -1)
    return logp.gather(-1, targets[rows][:, None])[:, 0], -(logp.exp() * logp).sum(-1), hidden, weight


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-7)])
@pytest.mark.parametrize("chunk_bytes", [1, 2**26], ids=["chunks", "whole"])
def test_values_and_gradients(dtype: torch.dtype, tolerance: float, temperature: float, chunk_bytes: int) -> None:
    hidden, weight, targets, rows = inputs(dtype)
    options = HeadOptions(vocab_size=V, temperature=temperature, chunk_bytes=chunk_bytes)
    logprobs, entropy = token_logprobs(hidden, weight, targets, rows, options)
    want_logprobs, want_entropy, want_hidden, want_weight = reference(hidden, weight, targets, rows, temperature)
    for got, want in ((logprobs, want_logprobs), (entropy, want_entropy)):
        assert got.shape == (int(rows.sum()),)
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()
    weights = torch.randn(2, int(rows.sum()), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights[0, 3] = weights[1, 3] = 0.0  # a row that the backward may leave out
    (logprobs.double() @ weights[0] + entropy.double() @ weights[1]).backward()
    (want_logprobs @ weights[0] + want_entropy @ weights[1]).backward()
    for got, want in ((hidden.grad, want_hidden.grad), (weight.grad, want_weight.grad)):
        assert want.abs().max() > 1e-2
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()
    assert hidden.grad[~rows].eq(0).all() and weight.grad[V:].eq(0).all()


@pytest.mark.parametrize("which", [0, 1], ids=["log-probs", "entropy"])
def test_each_output_alone_has_the_right_gradient(which: int) -> None:
    hidden, weight, targets, rows = inputs(torch.float64)
    token_logprobs(hidden, weight, targets, rows, HeadOptions(V))[which].sum().backward()
    want = reference(hidden, weight, targets, rows, 1.0)
    want[which].sum().backward()
    torch.testing.assert_close(hidden.grad, want[2].grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight.grad, want[3].grad, rtol=1e-10, atol=1e-12)


def test_no_row_is_wanted() -> None:
    hidden, weight, targets, _ = inputs(torch.float32)
    logprobs, entropy = token_logprobs(hidden, weight, targets, torch.zeros(T, dtype=torch.bool), HeadOptions(V))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.eq(0).all() and weight.grad.eq(0).all()


def test_the_ratio_is_one_when_the_temperature_is_the_rollouts() -> None:
    """Sampling at tau = 0.6 records log softmax(x / tau): the same call gives the same numbers, tau = 1 does not."""
    hidden, weight, targets, rows = inputs(torch.float32)
    recorded = reference(hidden, weight, targets, rows, 0.6)[0]
    ours = token_logprobs(hidden, weight, targets, rows, HeadOptions(V, temperature=0.6))[0]
    raw = token_logprobs(hidden, weight, targets, rows, HeadOptions(V))[0]
    assert ((ours - recorded).exp() - 1).abs().max() < 1e-5 < ((raw - recorded).exp() - 1).abs().max()


def test_the_heads_gradient_is_added_to_main_grad() -> None:
    """What megatron's DDP keeps in fp32: the second micro-batch adds to the first."""
    hidden, weight, targets, rows = inputs(torch.float32)
    parameter: Any = torch.nn.Parameter(weight.detach().clone())
    parameter.main_grad = torch.ones_like(parameter)
    for _ in range(2):
        token_logprobs(hidden, parameter, targets, rows, HeadOptions(V))[0].sum().backward()
    want = reference(hidden, weight, targets, rows, 1.0)
    want[0].sum().backward()
    assert parameter.grad_added_to_main_grad
    torch.testing.assert_close(parameter.main_grad.double(), 1 + 2 * want[3].grad, rtol=1e-5, atol=1e-5)


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets, rows = inputs(torch.float32)
    logprobs, entropy = token_logprobs((hidden * 1e3).detach().requires_grad_(), weight, targets, rows, HeadOptions(V))
    assert logprobs.isfinite().all() and entropy.isfinite().all() and entropy.min() >= -1e-3
