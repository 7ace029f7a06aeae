"""What the training numbers mean: metrics from summed statistics, per-step metrics, the exact length drift.

Every mean names its numerator and its denominator (`METRICS`), so adding over micro-batches and ranks before dividing
is right for any split. A metric whose denominator is 0 is left out, not reported as 0 or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

METRICS: dict[str, tuple[str, str | None]] = {
    # metric: (sum in the statistics of objectives.py, what it is divided by; None: by the number of mini-batches)
    "loss": ("loss", None),
    "policy_loss": ("policy_loss", None),
    "kl_loss": ("kl_loss", None),
    "entropy_loss": ("entropy_loss", None),
    "clip_fraction_positive": ("clipped_positive", "units_positive"),
    "clip_fraction_negative": ("clipped_negative", "units_negative"),
    "ratio_mean": ("ratio", "units"),
    "ratio_deviation_mean": ("ratio_deviation", "units"),
    "overflow_fraction": ("overflow", "units"),
    "kl_old_mean": ("kl_old", "response_tokens"),
    "kl_ref_mean": ("kl_ref", "response_tokens"),
    "kl_overflow_fraction": ("kl_overflow", "response_tokens"),
    "entropy_mean": ("entropy", "response_tokens"),
    "response_length_mean": ("response_tokens", "sequences"),
}

PER_SEQUENCE = ("seq_ratio", "clipped", "token_weight")
"""Statistics of objectives.py that are [n_seq] arrays, not sums."""


def sum_statistics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Adds the statistics of micro-batches, ranks or mini-batches, key by key; per-sequence arrays are left out."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in PER_SEQUENCE:
                totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def reduce_statistics(parts: Iterable[Mapping[str, Tensor | float]], *, mini_batches: int = 1) -> dict[str, float]:
    """Means from a list of statistics that cover ``mini_batches`` whole mini-batches (all their ranks and parts)."""
    totals = sum_statistics(parts)
    metrics = {}
    for name, (numerator, denominator) in METRICS.items():
        divisor = mini_batches if denominator is None else totals.get(denominator, 0.0)
        if numerator in totals and divisor:
            metrics[name] = totals[numerator] / divisor
    return metrics


def _mean(metrics: dict[str, float], name: str, values: NDArray[np.float64]) -> None:
    if values.size:
        metrics[name] = float(values.mean())


def step_statistics(
    *,
    lengths: ArrayLike,
    rewards: ArrayLike,
    correct: ArrayLike,
    truncated: ArrayLike,
    group_ids: ArrayLike,
    advantages: ArrayLike,
    clipped: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    rollout_logprobs: Sequence[ArrayLike] | None = None,
    old_logprobs: Sequence[ArrayLike] | None = None,
) -> dict[str, float]:
    """Metrics of one rollout step from per-sample arrays, all [n] in the same order.

    ``lengths`` in response tokens; ``clipped`` the clipped fraction of each sequence (objectives.py);
    ``rollout_logprobs`` and ``old_logprobs`` one array of response log-probs per sample. KL is KL(rollout || old),
    estimated on the sampled tokens: k1 = mean(rollout - old), k3 = mean(e^d - d - 1) with d = old - rollout.
    Short and long are the halves at the median length of the sequences that had a gradient (advantage not 0, not
    empty); the clip fractions count these only. ``token_weights`` (objectives.py) give the weights by length quartile
    and ``length_drift``.
    """
    length = np.asarray(lengths, np.float64)
    reward, advantage = np.asarray(rewards, np.float64), np.asarray(advantages, np.float64)
    is_correct, groups = np.asarray(correct, bool), np.asarray(group_ids)
    metrics: dict[str, float] = {}
    _mean(metrics, "reward_mean", reward)
    _mean(metrics, "accuracy", is_correct.astype(np.float64))
    _mean(metrics, "length_mean", length)
    if length.size:
        for p in (5, 50, 95):
            metrics[f"length_p{p:02d}"] = float(np.percentile(length, p))
        metrics["length_max"] = float(length.max())
    _mean(metrics, "length_mean_correct", length[is_correct])
    _mean(metrics, "length_mean_wrong", length[~is_correct])
    _mean(metrics, "truncated_fraction", np.asarray(truncated, np.float64))
    if groups.size:
        # advantages are exactly 0 where a group's rewards are all equal
        silent = [not advantage[groups == g].any() for g in np.unique(groups)]
        metrics["zero_variance_groups"] = float(sum(silent))
        metrics["zero_variance_fraction"] = float(np.mean(silent))
    if clipped is not None:
        fraction = np.asarray(clipped, np.float64)
        metrics.update(_clip_fractions(fraction, length, advantage))
        _mean(metrics, "drift_kappa", (advantage * (1 - fraction))[length > 0])
    if token_weights is not None:
        metrics.update(_length_weights(np.asarray(token_weights, np.float64), length, advantage))
    if rollout_logprobs is not None and old_logprobs is not None:
        metrics.update(_rollout_kl(rollout_logprobs, old_logprobs))
    return metrics


def _clip_fractions(
    clipped: NDArray[np.float64], length: NDArray[np.float64], advantage: NDArray[np.float64]
) -> dict[str, float]:
    acting = (length > 0) & (advantage != 0)
    if not acting.any():
        return {}
    short = length <= np.median(length[acting])
    metrics: dict[str, float] = {}
    for sign, signed in (("positive", advantage > 0), ("negative", advantage < 0)):
        _mean(metrics, f"clip_fraction_{sign}", clipped[acting & signed])
        _mean(metrics, f"clip_fraction_{sign}_short", clipped[acting & signed & short])
        _mean(metrics, f"clip_fraction_{sign}_long", clipped[acting & signed & ~short])
    _mean(metrics, "clip_fraction_short", clipped[acting & short])
    _mean(metrics, "clip_fraction_long", clipped[acting & ~short])
    return metrics


def _length_weights(
    weight: NDArray[np.float64], length: NDArray[np.float64], advantage: NDArray[np.float64]
) -> dict[str, float]:
    """The weight of a token by length quartile, and the push on the length.

    ``token_weight_q1`` (shortest quarter of the acting sequences) to ``q4``: mean weight of a token there over the mean
    weight of all their tokens, clipped ones with 0. Without length bias all four are near 1.

    ``length_drift`` is the mean of ``A_i u_i (1 - n_i / mean n)``: the slope of J in the stop logit if every token
    stopped with the same probability (see `analytic_length_drift`). Positive: responses shrink. It holds everything
    that moves the length, a reward that depends on it too, in units of the objective's weights.
    """
    acting = (length > 0) & (advantage != 0)
    if not acting.any() or not (weight * length)[acting].any():
        return {}
    overall = float((weight * length)[acting].sum() / length[acting].sum())
    quarter = np.searchsorted(np.quantile(length[acting], (0.25, 0.5, 0.75)), length)  # a tie goes to the shorter side
    metrics: dict[str, float] = {}
    for index in range(4):
        inside = acting & (quarter == index)
        if inside.any():
            tokens = length[inside].sum()
            metrics[f"token_weight_q{index + 1}"] = float((weight * length)[inside].sum() / tokens / overall)
    metrics["length_drift"] = float((advantage * weight * (1 - length / length[length > 0].mean()))[length > 0].mean())
    return metrics


def _rollout_kl(rollout_logprobs: Sequence[ArrayLike], old_logprobs: Sequence[ArrayLike]) -> dict[str, float]:
    rollout = [np.asarray(x, np.float64) for x in rollout_logprobs]
    old = [np.asarray(x, np.float64) for x in old_logprobs]
    if [x.shape for x in rollout] != [x.shape for x in old]:
        raise ValueError("rollout_logprobs and old_logprobs differ in their numbers of tokens")
    if not sum(x.size for x in rollout):
        return {}
    d = np.concatenate(old) - np.concatenate(rollout)
    return {
        "kl_rollout_k1": float(-d.mean()),
        "kl_rollout_k3": float((np.expm1(d) - d).mean()),
        "logprob_difference_max": float(np.abs(d).max()),
    }


class LengthDrift(NamedTuple):
    """dJ/d(stop logit) at ratio 1; positive: responses shrink."""

    kappa: float
    gspo: float
    luspo: float


def analytic_length_drift(p: float, accuracy: float, clip_positive: float, clip_negative: float) -> LengthDrift:
    """The exact push on response length when reward does not depend on length (arXiv 2602.05261's claim, closed form).

    Policy: at every token stop with probability ``p = sigmoid(logit)``, so a response of n tokens has the score
    ``d log P / d logit = 1 - n p``. Rewards are right with probability ``accuracy``; standardised advantages;
    ``clip_positive`` and ``clip_negative`` are the fractions of positive and negative sequences whose gradient the clip
    removes, independent of length. What is left over of the advantages is ``kappa = E[A * active]``, and an objective
    that gives each token the weight u(n) drifts by ``kappa * E[u(n) (1 - n p)]``: GSPO has u = 1/n, LUSPO u = 1.

    Real clipping does depend on length (a sequence ratio fluctuates more for short sequences), so with a wide clip
    LUSPO can still change the length. Raises ValueError for probabilities out of range.
    """
    if not 0 < p < 1 or not all(0 <= x <= 1 for x in (accuracy, clip_positive, clip_negative)):
        raise ValueError("p must lie inside (0, 1), accuracy and clip fractions within [0, 1]")
    kappa = math.sqrt(accuracy * (1 - accuracy)) * (clip_negative - clip_positive)
    mean_length, mean_inverse_length = 1 / p, -p * math.log(p) / (1 - p)
    return LengthDrift(kappa, gspo=kappa * (mean_inverse_length - p), luspo=kappa * (1 - p * mean_length))
