"""The metrics of a step: one table of names, and the files they go to.

Every metric the trainer may report is a row of ``METRICS`` with its unit and what it is averaged over; other names are
written too (after the known ones, sorted), but have no description. The files are ``metrics.jsonl`` (one object per
step), ``samples.jsonl`` and TensorBoard events; all are cut on resume, so that a resumed run's files equal those of an
uninterrupted one apart from the timings. Other trackers are in trackers.py.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from luspo_megatron.report.records import append_line, cut_after_step, dump_line, jsonable, set_aside, step_of
from luspo_megatron.report.trackers import TensorBoard, Tracker

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Scalar = float | int | None


@dataclass(frozen=True)
class MetricSpec:
    """One metric. ``normaliser`` says what a value is averaged or summed over; ``format`` is a Python format spec.

    The unit "fraction" is a number from 0 to 1 that people are shown as a percentage.
    """

    name: str
    unit: str
    description: str
    normaliser: str
    format: str


_SAMPLES = "mean over the step's samples"
_TOKENS = "mean over the step's response tokens"
_UPDATES = "mean over the step's optimizer updates"
_WALL = "wall clock of rank 0, whole step"
_EVAL = "mean over the held-out prompts"

METRICS: dict[str, MetricSpec] = {spec.name: spec for spec in (
    MetricSpec("reward_mean", "", "Weighted reward", _SAMPLES, ".3f"),
    MetricSpec("pass_rate", "fraction", "Correct samples", _SAMPLES, ".1%"),
    MetricSpec("response_length_mean", "tokens", "Response length", _SAMPLES, ".1f"),
    *(MetricSpec(f"response_length_p{p:02d}", "tokens", f"{p}th percentile of the response length",
                 "over the step's samples", ".1f") for p in (5, 50, 95)),
    MetricSpec("response_length_correct", "tokens", "Response length of correct samples",
               "mean over correct samples", ".1f"),
    MetricSpec("response_length_wrong", "tokens", "Response length of wrong samples", "mean over wrong samples", ".1f"),
    MetricSpec("truncated_fraction", "fraction", "Samples cut off at the longest allowed response", _SAMPLES, ".1%"),
    MetricSpec("zero_variance_fraction", "fraction", "Groups whose rewards are all equal: no gradient from them",
               "mean over the step's groups", ".1%"),
    MetricSpec("clip_fraction_positive", "fraction", "Clipped, where the advantage is positive",
               "clipped sequences (tokens for token-level objectives) of those with A > 0", ".1%"),
    MetricSpec("clip_fraction_negative", "fraction", "Clipped, where the advantage is negative",
               "clipped sequences (tokens for token-level objectives) of those with A < 0", ".1%"),
    MetricSpec("clip_fraction_short", "fraction", "Clipped, of the shorter half of the responses",
               "clipped sequences (tokens for token-level objectives) of that half", ".1%"),
    MetricSpec("clip_fraction_long", "fraction", "Clipped, of the longer half of the responses",
               "clipped sequences (tokens for token-level objectives) of that half", ".1%"),
    *(MetricSpec(f"clip_fraction_{sign}_{half}", "fraction", f"Clipped, advantage {symbol} 0, {half}er half",
                 f"clipped sequences (tokens for token-level objectives) of the {half}er half with A {symbol} 0", ".1%")
      for sign, symbol in (("positive", ">"), ("negative", "<")) for half in ("short", "long")),
    *(MetricSpec(f"token_weight_q{index}", "times the mean", f"Effective weight per token, {name} quarter",
                 "mean over tokens of the sequences with a gradient, clipped ones 0, over the mean of all", ".2f")
      for index, name in enumerate(("shortest", "second", "third", "longest"), 1)),
    MetricSpec("drift_kappa", "", "Advantage that the clip leaves over (kappa); above 0 length-biased weights shorten",
               "mean over the step's samples of A where not clipped", "+.4f"),
    MetricSpec("length_drift", "", "Push on the length, as a slope in the stop logit; above 0 responses shrink",
               _SAMPLES, "+.1e"),
    MetricSpec("kl_rollout", "nats", "KL of the engine's policy to the actor's, before the update", _TOKENS, ".1e"),
    MetricSpec("logprob_max_diff", "nats", "Largest difference of engine and actor log-probs",
               "maximum over the step's response tokens", ".2e"),
    MetricSpec("kl_ref", "nats", "KL of the actor to the reference policy", _TOKENS, ".1e"),
    MetricSpec("entropy", "nats", "Entropy of the policy", _TOKENS, ".3f"),
    MetricSpec("loss", "", "Loss of the objective (minimised)", _UPDATES, ".4f"),
    MetricSpec("gradient_norm", "", "Global gradient norm before clipping", _UPDATES, "#.3g"),
    MetricSpec("expert_load_max", "times the mean", "Load of the busiest expert, in the layer where it is largest",
               "routed tokens of the step over the layer's mean per expert", ".2f"),
    MetricSpec("expert_idle_fraction", "fraction", "Experts that no token of the step was routed to",
               "mean over the layers", ".1%"),
    MetricSpec("lr", "", "Learning rate", "of the step's last update", ".2e"),
    MetricSpec("num_updates", "updates", "Optimizer updates of the step", "count", "d"),
    MetricSpec("tokens", "tokens", "Prompt and response tokens of the step", "sum over the step's samples", "d"),
    MetricSpec("tokens_per_second", "tokens/s", "Tokens of the step over its seconds",
               "all ranks together, evaluation and checkpoint not counted", ".0f"),
    MetricSpec("rollout_digest", "", "Digest of the step's prompt and response tokens",
               "every token, in order", "d"),
    MetricSpec("weight_version", "", "Version of the weights that the step left in the engines", "count", "d"),
    MetricSpec("seconds/rollout", "s", "Generation", _WALL, ".2f"),
    MetricSpec("seconds/reward", "s", "Reward workers", _WALL, ".2f"),
    MetricSpec("seconds/old_logprobs", "s", "Old (and reference) log-probs", _WALL, ".2f"),
    MetricSpec("seconds/train", "s", "Forward, backward and optimizer", _WALL, ".2f"),
    MetricSpec("seconds/sync", "s", "Weight sync to the engines", _WALL, ".2f"),
    MetricSpec("seconds/eval", "s", "Evaluation", _WALL, ".2f"),
    MetricSpec("seconds/save", "s", "Checkpoint", _WALL, ".2f"),
    MetricSpec("seconds/step", "s", "Whole step", _WALL, ".2f"),
    MetricSpec("eval/pass_at_1", "fraction", "Held-out pass rate", _EVAL, ".1%"),
    MetricSpec("eval/pass_at_1_se", "fraction", "Standard error of the held-out pass rate", "over prompts", ".1%"),
    MetricSpec("eval/pass_at_k", "fraction", "Held-out prompts solved by at least one of k samples", _EVAL, ".1%"),
    MetricSpec("eval/greedy", "fraction", "Held-out pass rate of greedy decoding", _EVAL, ".1%"),
    MetricSpec("eval/response_length_mean", "tokens", "Held-out response length",
               "mean over the held-out samples", ".1f"),
)}
STATISTICS_NAMES = {
    "reward_mean": "reward_mean", "pass_rate": "accuracy", "response_length_mean": "length_mean",
    **{f"response_length_{p}": f"length_{p}" for p in ("p05", "p50", "p95")},
    "response_length_correct": "length_mean_correct",
    "response_length_wrong": "length_mean_wrong", "truncated_fraction": "truncated_fraction",
    "zero_variance_fraction": "zero_variance_fraction", "kl_rollout": "kl_rollout_k3",
    "logprob_max_diff": "logprob_difference_max",
    **{name: name for name in METRICS if name.startswith(("clip_fraction_", "token_weight_"))},
    "drift_kappa": "drift_kappa", "length_drift": "length_drift",
}
"""Names of this table -> names of algorithm/statistics.step_statistics."""

_ORDER = {name: index for index, name in enumerate(METRICS)}

PHASES = tuple(name.removeprefix("seconds/") for name in METRICS
               if name.startswith("seconds/") and name != "seconds/step")


def format_metric(name: str, value: Any) -> str:
    """The value as people read it; "-" for a missing one. Unknown names get four significant digits."""
    if isinstance(value, str):
        return value
    if value is None or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return "-"
    spec = METRICS.get(name)
    if spec is None:
        return f"{float(value):.4g}"
    return f"{round(value):d}" if spec.format == "d" else f"{float(value):{spec.format}}"


def ordered(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics in the table's order, unknown names after them, sorted: equal runs write equal files."""
    return {name: metrics[name] for name in sorted(metrics, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))}


class MetricSinks:
    """Writes the metrics of each step to <run_dir>/metrics.jsonl and TensorBoard, and samples to samples.jsonl.

    ``resume_step=None`` starts anew: files of an earlier run in the folder are renamed to ``<name>.1`` and so on.
    ``resume_step=s`` continues after step s: records of later steps are cut off.
    ``trackers`` get the same rows, and are closed with this. ``warn`` receives one message for each value that is not a
    finite number (written as null).
    """

    def __init__(self, run_dir: str | Path, tensorboard: bool = True, resume_step: int | None = None,
                 warn: Callable[[str], None] = warnings.warn, trackers: Sequence[Tracker] = ()) -> None:
        self._dir = Path(run_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        self._warn = warn
        self._path = self._dir / METRICS_FILE
        self._last: dict[str, Any] = {}  # the last row, which another write of the same step completes
        if resume_step is None:
            for name in (METRICS_FILE, SAMPLES_FILE, TENSORBOARD_FOLDER):
                set_aside(self._dir / name)
        else:
            cut_after_step(self._path, resume_step)
            cut_after_step(self._dir / SAMPLES_FILE, resume_step)
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        if lines:
            self._last = json.loads(lines[-1])
        self._last_size = len(lines[-1]) if lines else 0
        self._file = self._path.open("r+b" if self._path.exists() else "w+b")
        self._file.seek(0, os.SEEK_END)
        self._trackers = list(trackers)
        if tensorboard:
            self._trackers.append(TensorBoard(self._dir / TENSORBOARD_FOLDER, resume_step))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step. The same step again adds to its row (seconds/save, a later evaluation).

        Raises ValueError when the step is earlier than the last one written.
        """
        last_step = step_of(self._last)
        if last_step is not None and step < last_step:
            raise ValueError(f"step {step} after step {last_step}: metrics are written in order")
        values = {name: self._finite(name, value) for name, value in metrics.items() if name != "step"}
        again = step == last_step
        row = {"step": int(step), **ordered({**self._last, **values} if again else values)}
        row["step"] = int(step)
        line = dump_line(row)
        if again:
            self._file.seek(-self._last_size, os.SEEK_END)
        self._file.write(line)
        self._file.truncate()
        self._file.flush()
        self._last, self._last_size = row, len(line)
        for tracker in self._trackers:
            tracker.write(step, values)

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append samples (prompt, response, reward, length, correct) of a step to samples.jsonl."""
        for row in rows:
            append_line(self._dir / SAMPLES_FILE, {"step": int(step), **row})

    def close(self) -> None:
        self._file.close()
        while self._trackers:
            self._trackers.pop().close()

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _finite(self, name: str, value: Any) -> Any:
        plain = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(plain, float) and not math.isfinite(plain):
            self._warn(f"metric {name} is {plain}; it is written as null")
            return None
        return jsonable(plain)

