"""A LUSPO loss over a vocabulary head in float64, written the plainest way: the oracle of the loss stage's tests.

Whole [T, V] logits, torch's log_softmax and autograd, and the objective in loops over sequences and tokens, from the
formulas of docs/loss.md. Nothing of luspo_megatron is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """T packed tokens; the head has rows of padding, which would win every softmax if they counted."""

    hidden: Tensor  # [T, h]
    weight: Tensor  # [padded V, h]
    targets: Tensor  # [T]
    mask: Tensor  # [T] bool
    lengths: tuple[int, ...]
    old: Tensor  # [T] float64
    ref: Tensor  # [T] float64
    advantages: Tensor  # [sequences] float64
    vocab: int
    temperature: float = 1.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    clip: tuple[float, float] = field(default=(0.02, 0.03))

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).int()

    def to(self, dtype: torch.dtype) -> Inputs:
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))


def make_inputs(lengths: tuple[int, ...] = (7, 0, 5, 9, 3), hidden: int = 16, vocab: int = 301, padded: int = 384,
                seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> Inputs:
    """Some sequences are clipped and some not; the first token of each sequence is a prompt; values are those of
    `dtype`, so that lower precisions start from the same numbers. Logits reach about 5: in float32 the relative error
    of e^x is about 6e-8 |x|, whoever computes it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, weight = normal(tokens, hidden).to(dtype).double(), (normal(padded, hidden) * 0.25).to(dtype).double()
    weight[vocab:] = 100.0
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[: min(2, tokens)] = torch.tensor([0, vocab - 1])[:tokens]
    mask = torch.rand(tokens, generator=generator) < 0.9
    for start in torch.tensor([0, *lengths]).cumsum(0)[:-1]:
        mask[start : start + 1] = False
    draft = Inputs(x, weight, targets, mask, lengths, torch.zeros(tokens), torch.zeros(tokens), torch.zeros(0), vocab,
                   **settings)
    logp, _ = token_values(draft)
    shift = torch.repeat_interleave(normal(len(lengths)) * 0.06, torch.tensor(lengths))
    return replace(draft, old=logp + shift + normal(tokens) * 0.01, ref=logp + normal(tokens) * 0.3,
                   advantages=normal(len(lengths)))


def token_values(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(log-probs [T], entropy [T])"""
    logp = torch.log_softmax(inputs.hidden @ inputs.weight[: inputs.vocab].t() / inputs.temperature, -1)
    return logp.gather(-1, inputs.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@dataclass(frozen=True)
class Outcome:
    """loss [], log-probs and entropy [T], d loss / d hidden and d weight; clipped: sequences the clip stopped."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor
    clipped: int


def oracle(inputs: Inputs) -> Outcome:
    inputs = inputs.to(torch.float64)
    hidden, weight = inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    logp, entropy = token_values(replace(inputs, hidden=hidden, weight=weight))
    low, high = inputs.clip
    total = torch.zeros((), dtype=torch.float64)
    clipped = start = 0
    for i, length in enumerate(inputs.lengths):
        tokens = [t for t in range(start, start + length) if inputs.mask[t]]
        start += length
        if not tokens:
            continue
        advantage = float(inputs.advantages[i])
        ratio = (sum(logp[t] - inputs.old[t] for t in tokens) / len(tokens)).exp()
        plain, cut = ratio * advantage, min(max(float(ratio.detach()), 1 - low), 1 + high) * advantage
        clipped += cut < float(plain.detach())
        total = total - len(tokens) * (cut if cut < float(plain.detach()) else plain)
        for t in tokens:
            d = inputs.ref[t] - logp[t]
            total = total + inputs.kl_coef * (d.exp() - d - 1) - inputs.entropy_coef * entropy[t]
    loss = total / len(inputs.lengths)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Outcome(loss.detach(), logp.detach(), entropy.detach(), hidden.grad, weight.grad, clipped)


def relative_error(got: Tensor, want: Tensor, least: float = 1e-6) -> float:
    """Largest difference over the largest wanted element, which must not be near zero."""
    largest = float(want.abs().max())
    assert largest > least, f"nothing to compare: the largest element is {largest}"
    return float((got.double() - want).abs().max()) / largest
