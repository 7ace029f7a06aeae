"""What `luspo parity` says: do Hugging Face, actor and engines hold the same weights, and give the same log-probs?

Pure. Two kinds of blame are kept apart: weights differ (checksums per tensor), or the weights are equal and the
numerics differ (dtype, kernels, temperature, rope, routing ties).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NAMES_SHOWN = 5


@dataclass(frozen=True)
class WeightsCheck:
    """Two sets of per-tensor checksums. ``known`` is False where one side gives none."""

    left: str
    right: str
    known: bool
    compared: int = 0
    differing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # on one side only

    @property
    def equal(self) -> bool:
        return self.known and not self.differing and not self.missing

    def __str__(self) -> str:
        pair = f"{self.left} / {self.right}"
        if not self.known:
            return f"{pair}: not compared, this engine gives no checksums per tensor"
        if self.equal:
            return f"{pair}: all {self.compared} tensors are equal"
        parts = []
        for names, what in ((self.differing, "differ"), (self.missing, "are on one side only")):
            if names:
                more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
                parts.append(f"{len(names)} of {self.compared} tensors {what}: {', '.join(names[:NAMES_SHOWN])}{more}")
        return f"{pair}: {'; '.join(parts)}"


@dataclass(frozen=True)
class NumericsCheck:
    """Differences of log-probs of the same tokens, in nats."""

    left: str
    right: str
    max: float
    mean: float
    tokens: int
    worst: str  # which sample and token the maximum is

    def __str__(self) -> str:
        return f"{self.left} / {self.right}: max {self.max:.2e}, mean {self.mean:.2e} over {self.tokens} tokens " \
            f"(largest at {self.worst})"


def compare_weights(left: str, right: str, ours: Mapping[str, str], theirs: Mapping[str, str] | None) -> WeightsCheck:
    if theirs is None:
        return WeightsCheck(left, right, False)
    both = ours.keys() & theirs.keys()
    return WeightsCheck(left, right, True, len(ours.keys() | theirs.keys()),
                        tuple(sorted(name for name in both if ours[name] != theirs[name])),
                        tuple(sorted(ours.keys() ^ theirs.keys())))


def compare_logprobs(left: str, right: str, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> NumericsCheck:
    """``ours[i]``, ``theirs[i]``: log-probs [response tokens] of sample i. A NaN counts as infinitely far."""
    differences = [np.nan_to_num(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), nan=np.inf)
                   for a, b in zip(ours, theirs, strict=True)]
    flat = np.concatenate(differences)
    sample = int(np.argmax([d.max(initial=0.0) for d in differences]))
    token = int(differences[sample].argmax())
    return NumericsCheck(left, right, float(flat.max()), float(flat.mean()), int(flat.size),
                         f"sample {sample}, token {token}")


def blame(weights: WeightsCheck, numerics: NumericsCheck, tolerance: float) -> str | None:
    """One sentence on what is wrong between two parties; None when nothing is."""
    pair = f"{numerics.left} / {numerics.right}"
    close = numerics.max <= tolerance
    if weights.known and not weights.equal:
        effect = "though the log-probs agree here" if close else f"log-probs are up to {numerics.max:.2e} apart"
        return f"{pair}: the WEIGHTS differ ({effect})"
    if close:
        return None
    if not weights.known:
        return f"{pair}: log-probs are up to {numerics.max:.2e} apart; weights or numerics, this engine cannot tell"
    return f"{pair}: the weights are equal, the NUMERICS differ by up to {numerics.max:.2e} (allowed " \
        f"{tolerance:.0e}): look at dtype, temperature, rope and attention settings"


def verdict(checks: Sequence[tuple[WeightsCheck, NumericsCheck]], tolerance: float) -> tuple[str, bool]:
    """The report's text, and whether all is well."""
    lines = ["weights (xxh3 per tensor)", *(f"  {weights}" for weights, _ in checks),
             "log-probs of the same tokens, |difference| in nats", *(f"  {numerics}" for _, numerics in checks)]
    wrong = [text for weights, numerics in checks if (text := blame(weights, numerics, tolerance)) is not None]
    lines += ["verdict", *(f"  {text}" for text in wrong or [f"equal within {tolerance:.0e}"])]
    return "\n".join(lines), not wrong
