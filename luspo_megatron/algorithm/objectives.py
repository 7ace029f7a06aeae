"""Policy objectives on packed per-token log-probs: LUSPO, GSPO, GRPO, Dr.GRPO, DAPO, CISPO.

One pure function, `policy_objective`, driven by a table of four choices per objective. With ``n_i`` response tokens in
sequence ``i``, ``w_it = exp(logp_t - old_t)`` and ``s_i = exp(mean_t(logp_t - old_t))``, the maximised J is

========  ==========================================================  ===========================================
name      J                                                           paper
========  ==========================================================  ===========================================
luspo     1/N      sum_i n_i  min(s_i A_i, clip(s_i) A_i)             arXiv 2602.05261
gspo      1/N      sum_i      min(s_i A_i, clip(s_i) A_i)             arXiv 2507.18071
grpo      1/N      sum_i 1/n_i sum_t min(w_it A_i, clip(w_it) A_i)    arXiv 2402.03300
drgrpo    1/(N L)  sum_i sum_t min(w_it A_i, clip(w_it) A_i)          arXiv 2503.20783 (L = max_response_length)
dapo      1/M      sum_i sum_t min(w_it A_i, clip(w_it) A_i)          arXiv 2503.14476
cispo     1/M      sum_i sum_t detach(clip(w_it)) A_i logp_t          arXiv 2506.13585
========  ==========================================================  ===========================================

N and M are the sequences and response tokens of the *whole mini-batch* over all micro-batches and data-parallel ranks,
empty and masked sequences included. They are arguments, never counted from what is passed: that is why the losses of
any split of a mini-batch add up to the loss of the mini-batch, and why padding weighs nothing.

The LUSPO gradient on a response token is ``-A_i s_i / N`` where not clipped: no length in it.

Left out: context parallelism (sequences here are whole) and how the rollout correction weights come about (they are
an input). ``statistics.METRICS`` says how the returned sums become means.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from luspo_megatron.algorithm.packed import CuSeqlens, Packed, PerSequence, PerToken, Scalar, TokenMask, zero_where_not
from luspo_megatron.errors import UserError

MAX_LOG_RATIO = 10.0
"""Log ratios above this are clamped with zero gradient: with A < 0 the surrogate is otherwise unbounded."""

Statistics = dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """One row of the table. ``sequence_weight`` multiplies what a sequence contributes after min and clip."""

    name: str
    importance: Literal["token", "sequence"]
    clip: Literal["min", "detached"]
    sequence_weight: Literal["none", "length", "inverse_length"]
    denominator: Literal["sequences", "tokens", "sequences_times_max_length"]


OBJECTIVES: dict[str, Objective] = {
    row.name: row
    for row in (
        Objective("luspo", "sequence", "min", "length", "sequences"),
        Objective("gspo", "sequence", "min", "none", "sequences"),
        Objective("grpo", "token", "min", "inverse_length", "sequences"),
        Objective("drgrpo", "token", "min", "none", "sequences_times_max_length"),
        Objective("dapo", "token", "min", "none", "tokens"),
        Objective("cispo", "token", "detached", "none", "tokens"),
    )
}


def resolve_objective(objective: str | Objective) -> Objective | Callable[..., tuple[Tensor, Statistics]]:
    """A table row by name, or ``module:attribute``: an `Objective` row or a callable that takes the keyword arguments
    of `policy_objective` and returns (loss, statistics). Raises UserError for anything else."""
    if isinstance(objective, Objective):
        return objective
    if objective in OBJECTIVES:
        return OBJECTIVES[objective]
    module, colon, attribute = objective.partition(":")
    if not colon:
        raise UserError(
            f"algorithm.objective: unknown objective {objective!r}; use one of {', '.join(OBJECTIVES)}, "
            "or module:attribute"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"algorithm.objective: cannot import {objective!r} ({error}); check the module path") from error
    if not isinstance(found, Objective) and not callable(found):
        raise UserError(f"algorithm.objective: {objective!r} is neither an Objective row nor a callable; name one")
    return cast(Objective | Callable[..., tuple[Tensor, Statistics]], found)


@dataclass(frozen=True)
class _Units:
    """What carries a ratio: the tokens [T] or the sequences [n_seq], those that do not count with advantage 0."""

    surrogate: Tensor
    ratio: Tensor
    clipped: Tensor
    overflow: Tensor
    advantage: Tensor
    counted: Tensor
    limits: tuple[float, float] | None = None

    def reach(self) -> Tensor:
        """d surrogate / d log-prob per unit of advantage: the ratio, 0 where the clip or the overflow stops it; the cut
        ratio of the detached kind (its ``limits``), which stops nothing. 0 for units that do not count."""
        if self.limits is not None:
            return zero_where_not(self.counted, self.ratio.clamp(*self.limits))
        return zero_where_not(self.counted & ~self.clipped & ~self.overflow, self.ratio)

    def sums(self) -> Statistics:
        positive, negative = self.advantage > 0, self.advantage < 0
        return {
            "units": self.counted.sum(),
            "units_positive": positive.sum(),
            "units_negative": negative.sum(),
            "clipped_positive": (self.clipped & positive).sum(),
            "clipped_negative": (self.clipped & negative).sum(),
            "ratio": zero_where_not(self.counted, self.ratio).sum(),
            "ratio_deviation": zero_where_not(self.counted, (self.ratio - 1).abs()).sum(),
            "overflow": self.overflow.sum(),
        }


def _units(
    row: Objective, log_ratio: Tensor, score: Tensor, advantage: Tensor, counted: Tensor, low: float, high: float
) -> _Units:
    """The clipped surrogate of each unit. ``score`` is its (mean) log-prob, read by the detached kind alone.

    "min" is min(ratio A, clip(ratio) A): clipped exactly where A > 0 and ratio > 1 + high, or A < 0 and
    ratio < 1 - low. "detached" cuts the ratio to the range whatever the sign of A and keeps every gradient.
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    above, below = ratio > 1 + high, ratio < 1 - low
    if row.clip == "detached":
        clipped = (above | below) & (advantage != 0)
        surrogate = ratio.detach().clamp(1 - low, 1 + high) * advantage * score
    else:
        clipped = (above & (advantage > 0)) | (below & (advantage < 0))
        surrogate = torch.where(clipped, ratio.detach().clamp(1 - low, 1 + high), ratio) * advantage
    limits = (1 - low, 1 + high) if row.clip == "detached" else None
    return _Units(surrogate, ratio.detach(), clipped, counted & (log_ratio > MAX_LOG_RATIO), advantage, counted, limits)


def _k3(d: Tensor) -> Tensor:
    """e^d - d - 1, without gradient above MAX_LOG_RATIO; 0 at d = 0, which masked tokens have."""
    d = d.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(d) - d


def _sequence_weight(row: Objective, packed: Packed) -> PerSequence:
    if row.sequence_weight == "length":
        return packed.counts
    if row.sequence_weight == "inverse_length":
        return 1 / packed.at_least_one
    return torch.ones_like(packed.counts)


def _denominator(row: Objective, num_sequences: int, num_tokens: int, max_response_length: int | None) -> float:
    if num_sequences < 1 or num_tokens < 0:
        raise ValueError(f"{num_sequences} sequences and {num_tokens} tokens cannot be a mini-batch's global counts")
    if row.denominator == "sequences":
        return float(num_sequences)
    if row.denominator == "tokens":
        return float(max(num_tokens, 1))  # every response of the mini-batch empty: the sums are 0 as well
    if not max_response_length:
        raise ValueError(f"objective {row.name!r} divides by the longest allowed response: pass max_response_length")
    return float(num_sequences) * max_response_length


def _check(logprobs: Tensor, cu_seqlens: Tensor, advantages: Tensor, **per_token: Tensor | None) -> None:
    if advantages.shape != (cu_seqlens.shape[0] - 1,):
        raise ValueError(f"advantages {tuple(advantages.shape)} do not fit cu_seqlens {tuple(cu_seqlens.shape)}")
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs has {tuple(logprobs.shape)}")


def policy_objective(
    objective: str | Objective,
    *,
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerSequence,
    cu_seqlens: CuSeqlens,
    response_mask: TokenMask,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
    global_num_sequences: int,
    global_num_tokens: int,
    max_response_length: int | None = None,
    ref_logprobs: PerToken | None = None,
    kl_coef: float = 0.0,
    entropy: PerToken | None = None,
    entropy_coef: float = 0.0,
    rollout_weights: PerToken | None = None,
) -> tuple[Scalar, Statistics]:
    """The loss to be minimised, ``-J + kl_coef * KL - entropy_coef * H``, of the packed sequences that are passed.

    Divided by the global denominator, so the losses (and gradients) of all micro-batches and data-parallel ranks of a
    mini-batch add up to those of the mini-batch. Differentiable in ``logprobs`` and ``entropy`` alone; the result has
    the dtype of ``logprobs``, at least float32.

    Masked tokens may hold anything (NaN, inf): value and gradient are those without them. A sequence without response
    tokens has ratio 1 and weight 0, its advantage is not read, and it stays counted in ``global_num_sequences``.
    Padding sequences are such sequences, except that ``global_num_sequences`` must not count them.

    KL (k3 = e^d - d - 1 with d = ref - logp) and entropy are aggregated as the objective's own gradient is: with
    X_i the sum over the response tokens of sequence i, luspo (1/N) sum_i X_i; gspo and grpo (1/N) sum_i X_i / n_i;
    drgrpo 1/(N L) sum_i X_i; dapo and cispo (1/M) sum_i X_i.

    ``rollout_weights`` (detached) multiply the policy term only: each token's own term at token importance, their mean
    over the sequence at sequence importance. The length weight of LUSPO stays n_i; all ones change nothing.

    Returns (loss, statistics). Statistics are detached float64 sums, to be added over micro-batches and ranks and then
    divided (a *unit* is a token or a sequence, whatever carries the ratio), and three [n_seq] arrays: ``seq_ratio``
    s_i, ``clipped``, the fraction of the sequence's units that was clipped, and ``token_weight``, what one unit of
    advantage weighs on a response token: the mean over the tokens of ``|dJ/dlogp_t| / |A_i|`` times the denominator
    (without rollout weights), so LUSPO's is s_i and GSPO's s_i / n_i where not clipped.

    Raises ValueError for shapes or counts that do not fit, UserError for an unknown objective.
    """
    row = resolve_objective(objective)
    if not isinstance(row, Objective):
        return row(
            logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, cu_seqlens=cu_seqlens,
            response_mask=response_mask, clip_low=clip_low, clip_high=clip_high,
            global_num_sequences=global_num_sequences, global_num_tokens=global_num_tokens,
            max_response_length=max_response_length, ref_logprobs=ref_logprobs, kl_coef=kl_coef, entropy=entropy,
            entropy_coef=entropy_coef, rollout_weights=rollout_weights,
        )  # fmt: skip
    _check(logprobs, cu_seqlens, advantages, old_logprobs=old_logprobs, response_mask=response_mask,
           ref_logprobs=ref_logprobs, entropy=entropy, rollout_weights=rollout_weights)  # fmt: skip
    if (kl_coef and ref_logprobs is None) or (entropy_coef and entropy is None):
        raise ValueError("kl_coef needs ref_logprobs, entropy_coef needs entropy")
    denominator = _denominator(row, global_num_sequences, global_num_tokens, max_response_length)

    packed = Packed(cu_seqlens, response_mask)
    logp = packed.at(logprobs)
    log_ratio = logp - packed.at(old_logprobs.detach())
    seq_log_ratio = packed.mean(log_ratio)
    seq_advantages = zero_where_not(packed.present, advantages.detach())
    weight = _sequence_weight(row, packed)
    at_sequence = row.importance == "sequence"

    if at_sequence:
        units = _units(row, seq_log_ratio, packed.mean(logp), seq_advantages, packed.present, clip_low, clip_high)
    else:
        units = _units(row, log_ratio, logp, packed.spread(seq_advantages), packed.mask, clip_low, clip_high)
    surrogate = units.surrogate
    if rollout_weights is not None:
        correction = packed.at(rollout_weights.detach())
        surrogate = surrogate * (packed.mean(correction) if at_sequence else correction)
    policy_loss = -(weight * (surrogate if at_sequence else packed.sum(surrogate))).sum() / denominator
    losses = {"policy_loss": policy_loss}

    token_weight = weight / packed.at_least_one if at_sequence else weight
    extra: Statistics = {}
    if ref_logprobs is not None:
        d = packed.at(ref_logprobs.detach()) - logp
        k3 = packed.sum(_k3(d))
        losses["kl_loss"] = kl_coef * (token_weight * k3).sum() / denominator
        extra |= {"kl_ref": k3.sum(), "kl_overflow": (d > MAX_LOG_RATIO).sum()}
    if entropy is not None:
        entropies = packed.sum(packed.at(entropy))
        losses["entropy_loss"] = -entropy_coef * (token_weight * entropies).sum() / denominator
        extra["entropy"] = entropies.sum()
    loss = torch.stack(list(losses.values())).sum()

    with torch.no_grad():
        clipped = units.clipped.double() if at_sequence else packed.mean(units.clipped.double())
        extra |= {
            "loss": loss,
            **losses,
            "sequences": packed.present.sum(),
            "response_tokens": packed.counts.sum(),
            "kl_old": _k3(-log_ratio).sum(),
            "seq_ratio": seq_log_ratio.clamp(max=MAX_LOG_RATIO).exp(),
            "clipped": clipped,
            "token_weight": token_weight * (units.reach() if at_sequence else packed.mean(units.reach())),
            **units.sums(),
        }
    statistics = {name: value.detach().double() for name, value in extra.items()}
    return loss.to(torch.promote_types(logprobs.dtype, torch.float32)), statistics


def supervised_objective(
    logprobs: PerToken, response_mask: TokenMask, global_num_tokens: int
) -> tuple[Scalar, Statistics]:
    """Token-mean cross-entropy ``-(1/M) sum_t m_t logp_t``, M = response tokens of the whole mini-batch (global).

    The same conventions as `policy_objective`: minimised, summed over what is passed, masked tokens may hold anything.
    """
    if logprobs.shape != response_mask.shape:
        raise ValueError(f"response_mask has shape {tuple(response_mask.shape)}, logprobs {tuple(logprobs.shape)}")
    mask = response_mask.bool()
    loss = -zero_where_not(mask, logprobs).sum() / max(global_num_tokens, 1)
    statistics = {"loss": loss.detach(), "response_tokens": mask.sum().double()}
    return loss.to(torch.promote_types(logprobs.dtype, torch.float32)), statistics
