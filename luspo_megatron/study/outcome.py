"""What came out of the length-bias study: figures per objective, and sentences that follow from them alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from luspo_megatron.algorithm.statistics import analytic_length_drift
from luspo_megatron.config_tools import TOKEN_LEVEL, LengthBiasConfig

Row = Mapping[str, Any]
NAMES = {"luspo": "LUSPO", "gspo": "GSPO", "grpo": "GRPO", "drgrpo": "Dr.GRPO", "dapo": "DAPO", "cispo": "CISPO"}
SAME = 0.05  # relative changes below this are called no change


@dataclass(frozen=True)
class Outcome:
    """Means over the seeds of one objective and clip. Lengths in tokens, the rest fractions."""

    algorithm: str
    clip: str
    runs: Sequence[Row]
    length_start: float
    length_end: float
    length_sd: float
    accuracy_start: float
    accuracy_end: float
    clip_positive: float
    clip_negative: float

    @property
    def label(self) -> str:
        return NAMES[self.algorithm] + (", wide clip" if self.clip == "wide" else "")

    @property
    def change(self) -> float:
        return self.length_end / self.length_start - 1

    @property
    def change_text(self) -> str:
        return "0%" if abs(self.change) < 0.005 else f"{self.change:+.0%}"

    @property
    def ends(self) -> list[float]:
        return [float(run["length_end"]) for run in self.runs]

    def mean(self, name: str) -> float | None:
        """Mean of a metric over all steps of all seeds."""
        values = [value for run in self.runs for value in run["curve"].get(name, ()) if value is not None]
        return fmean(values) if values else None


@dataclass(frozen=True)
class Drift:
    """A run's own clip fractions, accuracy and length in the closed form, beside what its gradients were."""

    outcome: Outcome
    kappa_exact: float
    kappa_measured: float
    exact: float
    measured: float
    standard_error: float


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """In the order in which they first appear by seed, usual clips before wide ones."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["clip"] != "usual", row["seed"])):
        groups.setdefault((row["algorithm"], row["clip"]), []).append(row)
    found = []
    for (algorithm, clip), runs in groups.items():
        ends = [run["length_end"] for run in runs]
        mean = {name: fmean(run[name] or 0.0 for run in runs) for name in (
            "length_start", "length_end", "accuracy_start", "accuracy_end", "clip_positive", "clip_negative")}
        found.append(Outcome(algorithm, clip, runs, length_sd=stdev(ends) if len(ends) > 1 else math.nan, **mean))
    order = {name: index for index, name in enumerate(NAMES)}
    return sorted(found, key=lambda item: (item.clip != "usual", order[item.algorithm]))


def find(found: Sequence[Outcome], algorithm: str, clip: str = "usual") -> Outcome | None:
    return next((item for item in found if (item.algorithm, item.clip) == (algorithm, clip)), None)


def seeds_ahead(found: Sequence[Outcome], clip: str = "usual") -> tuple[int, int] | None:
    """(seeds in which LUSPO ended longer than GSPO, seeds that both have); None unless both were run."""
    luspo, gspo = find(found, "luspo", clip), find(found, "gspo", clip)
    if luspo is None or gspo is None:
        return None
    other = {run["seed"]: run["length_end"] for run in gspo.runs}
    both = [run for run in luspo.runs if run["seed"] in other]
    return sum(run["length_end"] > other[run["seed"]] for run in both), len(both)


def drifts(found: Sequence[Outcome]) -> list[Drift]:
    """For LUSPO and GSPO. The closed form knows no answer token and no clip that depends on the length."""
    out = []
    for item in found:
        if item.algorithm in TOKEN_LEVEL:
            continue
        accuracy, length = item.mean("pass_rate"), item.mean("response_length_mean")
        kappa = item.mean("drift_kappa")
        slopes = [fmean(value for value in run["curve"]["stop_slope"] if value is not None) for run in item.runs]
        assert accuracy is not None and length is not None and kappa is not None
        exact = analytic_length_drift(1 / length, accuracy, item.clip_positive, item.clip_negative)
        error = stdev(slopes) / math.sqrt(len(slopes)) if len(slopes) > 1 else math.nan
        out.append(Drift(item, exact.kappa, kappa, getattr(exact, item.algorithm), fmean(slopes), error))
    return out


# ------------------------------------------------------------------------------------------------------- in words
def findings(config: LengthBiasConfig, found: Sequence[Outcome]) -> list[str]:
    """Sentences; each says what these runs did, and the reason that the objectives give for it."""
    sentences = []
    ahead = seeds_ahead(found)
    luspo, gspo = find(found, "luspo"), find(found, "gspo")
    if gspo:
        sentences.append(f"GSPO: mean length {_went(gspo)}." + (
            " Its gradient gives each token the weight 1/n, and the clip takes more negative than positive advantages "
            f"({gspo.clip_negative:.1%} against {gspo.clip_positive:.1%}); what is left over favours the tokens of "
            "short responses." if gspo.change < -SAME and gspo.clip_negative > gspo.clip_positive else ""))
    if luspo:
        sentences.append(f"LUSPO: mean length {_went(luspo)}. Its weight per token does not depend on the length.")
    if ahead:
        sentences.append(f"LUSPO ended longer than GSPO in {ahead[0]} of {ahead[1]} seeds.")
    sentences += [_wide(item) for item in found if item.clip == "wide" and item.algorithm == "luspo"]
    grpo = find(found, "grpo")
    if grpo and len(grpo.runs) > 1:
        sentences.append(
            f"GRPO: mean length {_went(grpo)}, from {min(grpo.ends):.1f} to {max(grpo.ends):.1f} between seeds. Its "
            f"weight per token is 1/n too, but its clip of {config.token_clip_low:g}/{config.token_clip_high:g} takes "
            f"only {grpo.clip_positive:.2%} of the positive and {grpo.clip_negative:.2%} of the negative tokens, so "
            + ("that nothing steady pushes the length: it is a random walk, and one seed says nothing." if
               max(grpo.clip_positive, grpo.clip_negative) < 0.05 and config.task == "neutral" else
               "that the push of the clip is another one than GSPO's."))
    for item in found:
        if item.algorithm in ("drgrpo", "dapo"):
            sentences.append(
                f"{item.label}: mean length {_went(item)}, from {min(item.ends):.1f} to {max(item.ends):.1f} between "
                f"seeds. Its weight per token does not depend on the length either; its clip takes "
                f"{item.clip_positive:.2%} of the positive and {item.clip_negative:.2%} of the negative tokens.")
    return sentences


def limits(config: LengthBiasConfig) -> list[str]:
    """What such runs cannot show, whatever came out."""
    task = ("The reward of the neutral task does not depend on the length, so every change of the mean length comes "
            "from the objective, the clip and chance." if config.task == "neutral" else
            "Longer responses are right more often in this task, so a growing length is partly what was asked for.")
    return [
        task,
        "LUSPO's weight is unbiased; its clip is not: a sequence ratio fluctuates more for short responses, so they "
        "are clipped more, and a wide or lopsided clip shortens LUSPO's responses too.",
        "The objectives of a seed share prompts and luck, so their lengths wander together: compare objectives within "
        "a seed, and do not count the seeds of two objectives as independent evidence. Without a push the mean length "
        "still wanders, and upwards more easily than down, since it is the inverse of the stop probability.",
        "A tabular policy has no language model's habits, and its clip acts through Adam at one learning rate: signs "
        "and mechanism carry over, sizes do not. Nothing here says that longer responses are better.",
    ]


def summary_lines(config: LengthBiasConfig, rows: Sequence[Row]) -> list[str]:
    """The table and the findings for a terminal."""
    found = outcomes(rows)
    lines = [f"{'objective':<17}{'start':>7}{'end':>7}{'change':>8}{'sd':>6}{'accuracy':>15}{'clip+':>8}{'clip-':>8}"]
    for item in found:
        lines.append(f"{item.label:<17}{item.length_start:>7.1f}{item.length_end:>7.1f}{item.change_text:>8}"
                     f"{item.length_sd:>6.1f}{item.accuracy_start:>7.2f} ->{item.accuracy_end:>5.2f}"
                     f"{item.clip_positive:>8.1%}{item.clip_negative:>8.1%}")
    return [*lines, *findings(config, found)]


def _went(item: Outcome) -> str:
    return f"{item.length_start:.1f} to {item.length_end:.1f} tokens ({item.change_text})"


def _wide(item: Outcome) -> str:
    low, high = item.runs[0]["clip_low"], item.runs[0]["clip_high"]
    text = f"LUSPO with the wide clip ({low:g}/{high:g}): mean length {_went(item)}."
    if item.change > -SAME:
        return text
    parts = {(sign, half): item.mean(f"clip_fraction_{sign}_{half}") or 0.0
             for sign in ("negative", "positive") for half in ("short", "long")}
    return (f"{text} It shrinks although its weight is unbiased, because the clip is not: of the shorter half it takes "
            f"{parts['negative', 'short']:.1%} of the negative and {parts['positive', 'short']:.1%} of the positive "
            f"advantages, of the longer half {parts['negative', 'long']:.1%} and {parts['positive', 'long']:.1%}. "
            "Short wrong responses are spared, so short responses win.")
