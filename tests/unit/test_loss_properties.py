"""What must not matter to the loss stage: padding, order, chunk size, cut into micro-batches, cache, compaction.

Random problems (hypothesis) in float64, where equal means equal to 1e-11 of the largest element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs
from tests.fused_loss import fused, objective_of, spread
from tests.loss_inputs import Inputs, make_inputs

PER_TOKEN = ("hidden", "targets", "mask", "old", "ref")
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def problems(draw: Any) -> Inputs:
    lengths = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=5)))
    lengths = (*lengths, draw(st.integers(3, 9)))  # one sequence at least has tokens
    vocab = draw(st.integers(2, 300))
    return make_inputs(
        lengths, hidden=draw(st.integers(1, 12)), vocab=vocab, padded=vocab + draw(st.sampled_from([0, 1, 50])),
        seed=draw(st.integers(0, 10**6)), temperature=draw(st.sampled_from([0.5, 1.0, 1.4])),
        kl_coef=draw(st.sampled_from([0.0, 0.05])), entropy_coef=draw(st.sampled_from([0.0, 0.02])))


OPTIONS = st.fixed_dictionaries({"chunk_bytes": st.sampled_from([0, 1, 30000]),
                                 "cache_bytes": st.sampled_from([-1, 0, 40000, 2**40])})


def close(got: Tensor, want: Tensor, scale: float | None = None) -> None:
    scale = float(want.abs().max()) if scale is None else scale
    assert float((got - want).abs().max()) <= 1e-11 * max(scale, 1e-2)


def same(got: Any, want: Any) -> None:
    for name in ("loss", "logprobs", "entropy", "grad_hidden", "grad_weight"):
        close(getattr(got, name), getattr(want, name))


def test_the_problems_are_not_trivial() -> None:
    found = fused(make_inputs(seed=1))
    assert found.loss.abs() > 0.1 and found.grad_hidden.abs().max() > 0.05 and found.grad_weight.abs().max() > 0.05


@PROPERTY
@given(problems(), OPTIONS)
def test_chunks_and_cache(inputs: Inputs, options: dict[str, int]) -> None:
    same(fused(inputs, **options), fused(inputs, chunk_bytes=2**30, cache_bytes=0))


@PROPERTY
@given(problems(), OPTIONS, st.integers(1, 6), st.booleans())
def test_padding(inputs: Inputs, options: dict[str, int], extra: int, poison: bool) -> None:
    """Tokens outside the response mask, and a padding sequence of them at the end, hold NaN or anything."""
    want = fused(inputs, **options)
    pad = torch.full((extra, inputs.hidden.shape[1]), float("nan") if poison else 7.0, dtype=torch.float64)
    hole = torch.full((extra,), float("nan") if poison else 3.0, dtype=torch.float64)
    hidden = torch.where(inputs.mask[:, None], inputs.hidden, torch.nan if poison else 5.0)
    padded = replace(
        inputs, hidden=torch.cat([hidden, pad]), targets=torch.cat([inputs.targets, torch.full((extra,), -100)]),
        mask=torch.cat([inputs.mask, torch.zeros(extra, dtype=torch.bool)]), lengths=(*inputs.lengths, extra),
        old=torch.cat([inputs.old, hole]), ref=torch.cat([inputs.ref, hole]),
        advantages=torch.cat([inputs.advantages, hole[:1]]))
    tokens = len(inputs.mask)
    got = fused(padded, **options)
    # the padding sequence is counted by `fused`; the caller of the real objective does not count it
    share = len(padded.lengths) / len(inputs.lengths)
    close(got.loss * share, want.loss)
    close(got.grad_hidden[:tokens] * share, want.grad_hidden)
    close(got.grad_weight * share, want.grad_weight)
    assert got.grad_hidden[tokens:].eq(0).all()


@PROPERTY
@given(problems(), OPTIONS, st.randoms(use_true_random=False))
def test_order(inputs: Inputs, options: dict[str, int], random: Any) -> None:
    """Sequences in another order."""
    order = list(range(len(inputs.lengths)))
    random.shuffle(order)
    parts = torch.arange(len(inputs.mask)).split(list(inputs.lengths))
    index = torch.cat([parts[i] for i in order])
    moved = replace(inputs, **{name: getattr(inputs, name)[index] for name in PER_TOKEN},
                    lengths=tuple(inputs.lengths[i] for i in order), advantages=inputs.advantages[order])
    got, want = fused(moved, **options), fused(inputs, **options)
    close(got.loss, want.loss)
    close(got.logprobs, want.logprobs[index])
    close(got.grad_hidden, want.grad_hidden[index])
    close(got.grad_weight, want.grad_weight)


@PROPERTY
@given(problems(), OPTIONS, st.data())
def test_micro_batches(inputs: Inputs, options: dict[str, int], data: st.DataObject) -> None:
    """Cut anywhere between sequences, the parts' losses and gradients add up; the head's in main_grad."""
    cut = data.draw(st.integers(0, len(inputs.lengths)), label="cut")
    want = fused(inputs, **options)
    parameter = torch.nn.Parameter(inputs.weight.clone())
    parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    at = sum(inputs.lengths[:cut])
    total, grads = torch.zeros((), dtype=torch.float64), []
    for tokens, sequences in ((slice(0, at), slice(0, cut)), (slice(at, None), slice(cut, None))):
        part = replace(inputs, **{name: getattr(inputs, name)[tokens] for name in PER_TOKEN},
                       lengths=inputs.lengths[sequences], advantages=inputs.advantages[sequences])
        if not part.lengths:
            continue
        hidden = part.hidden.clone().requires_grad_()
        found = token_logprobs(hidden, parameter, part.targets, part.mask,
                               HeadOptions(part.vocab, part.temperature, **options))  # type: ignore[arg-type]
        loss, _ = objective_of(part, *(spread(values, part.mask) for values in found))
        loss = loss * (len(part.lengths) / len(inputs.lengths))  # the denominator of the whole
        loss.backward()
        total += loss.detach()
        grads.append(hidden.grad)
    close(total, want.loss)
    close(torch.cat(grads), want.grad_hidden)
    close(parameter.main_grad, want.grad_weight)  # type: ignore[attr-defined]


@PROPERTY
@given(problems(), OPTIONS, st.booleans(), st.integers(0, 10**6))
def test_compaction(inputs: Inputs, options: dict[str, int], with_entropy: bool, seed: int) -> None:
    """Gradients are linear in the coefficients: c with zeros, whose rows are left out, against two c without any."""
    generator = torch.Generator().manual_seed(seed)
    count = int(inputs.mask.sum())
    c = torch.randn(2, count, generator=generator, dtype=torch.float64)
    c[:, torch.rand(count, generator=generator) < 0.5] = 0.0
    c[1] *= with_entropy
    other = 2 + torch.rand(2, count, generator=generator, dtype=torch.float64)  # never 0, nor is c + other

    def gradients(coefficients: Tensor) -> tuple[Tensor, ...]:
        hidden, weight = inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
        found = token_logprobs(hidden, weight, inputs.targets, inputs.mask,
                               HeadOptions(inputs.vocab, inputs.temperature, **options))  # type: ignore[arg-type]
        return torch.autograd.grad(found, (hidden, weight), tuple(coefficients))

    other[0] = torch.where((c[0] + other[0]).abs() < 1e-3, other[0] + 1, other[0])
    for got, plus, minus in zip(gradients(c), gradients(c + other), gradients(other), strict=True):
        close(got, plus - minus, float(plus.abs().max()))
