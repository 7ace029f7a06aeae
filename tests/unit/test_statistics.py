"""Metrics by hand numbers, and the length drift against golden values and a plain series."""

import json
import math
from pathlib import Path

import pytest
import torch

from luspo_megatron.algorithm.statistics import (
    analytic_length_drift,
    reduce_statistics,
    step_statistics,
    sum_statistics,
)

DRIFTS = json.loads((Path(__file__).parents[1] / "goldens" / "luspo_goldens.json").read_text())["analytic_length_drift"]


@pytest.mark.parametrize("golden", DRIFTS)
def test_drift_goldens(golden):
    drift = analytic_length_drift(golden["p"], golden["acc"], golden["clip_pos"], golden["clip_neg"])
    assert drift.kappa == pytest.approx(golden["kappa"], rel=1e-11, abs=1e-15)
    assert drift.gspo == pytest.approx(golden["gspo"], rel=1e-11, abs=1e-15)
    assert abs(drift.luspo) < 1e-15


def test_drift_goldens_are_not_all_zero():
    assert max(abs(g["gspo"]) for g in DRIFTS) > 1e-3 and any(g["gspo"] < 0 for g in DRIFTS)


@pytest.mark.parametrize("p", [0.5, 1 / 16, 1 / 256])
def test_drift_against_the_series(p):
    """Sum over lengths, and over right and wrong samples with their standardised advantages."""
    accuracy, clip_positive, clip_negative = 0.3, 0.1, 0.4
    right, wrong = math.sqrt((1 - accuracy) / accuracy), -math.sqrt(accuracy / (1 - accuracy))
    active = accuracy * right * (1 - clip_positive) + (1 - accuracy) * wrong * (1 - clip_negative)
    lengths = range(1, int(45 / p))
    gspo = active * math.fsum((1 - p) ** (n - 1) * p * (1 - n * p) / n for n in lengths)
    luspo = active * math.fsum((1 - p) ** (n - 1) * p * (1 - n * p) for n in lengths)
    drift = analytic_length_drift(p, accuracy, clip_positive, clip_negative)
    assert drift.kappa == pytest.approx(active, rel=1e-12) and active > 0.1
    assert drift.gspo == pytest.approx(gspo, rel=1e-11) and gspo > 1e-3
    assert drift.luspo == pytest.approx(luspo, abs=1e-14)


@pytest.mark.parametrize("bad", [(0, 0.5, 0, 0), (1, 0.5, 0, 0), (0.5, 1.1, 0, 0), (0.5, 0.5, -0.1, 0)])
def test_drift_out_of_range(bad):
    with pytest.raises(ValueError):
        analytic_length_drift(*bad)


def test_reduce_divides_sums_not_means():
    parts = [
        {"entropy": torch.tensor(3.0), "response_tokens": torch.tensor(1.0), "loss": torch.tensor(0.25)},
        {"entropy": torch.tensor(9.0), "response_tokens": torch.tensor(5.0), "loss": torch.tensor(0.5)},
        {"clipped_positive": 1.0, "units_positive": 4.0, "clipped_negative": 0.0, "units_negative": 0.0,
         "seq_ratio": torch.ones(3)},
    ]  # fmt: skip
    assert sum_statistics(parts)["entropy"] == 12 and "seq_ratio" not in sum_statistics(parts)
    assert reduce_statistics(parts) == {"entropy_mean": 2.0, "loss": 0.75, "clip_fraction_positive": 0.25}
    assert reduce_statistics(parts, mini_batches=3)["loss"] == 0.25
    assert reduce_statistics([reduced := sum_statistics(parts)]) == reduce_statistics(parts), reduced
    assert reduce_statistics([]) == {}


STEP = {
    "lengths": [10, 2, 4, 8, 0, 6],
    "rewards": [1, 0, 1, 0, 0, 0],
    "correct": [True, False, True, False, False, False],
    "truncated": [True, False, False, False, False, False],
    "group_ids": [3, 3, 9, 9, 4, 4],
    "advantages": [1.0, -1.0, 1.0, -1.0, 0.0, 0.0],
}


def test_step_statistics():
    metrics = step_statistics(**STEP, clipped=[1, 0, 0, 1, 1, 1])
    assert metrics == pytest.approx({
        "reward_mean": 1 / 3, "accuracy": 1 / 3,
        "length_mean": 5, "length_p05": 0.5, "length_p50": 5, "length_p95": 9.5, "length_max": 10,
        "length_mean_correct": 7, "length_mean_wrong": 4, "truncated_fraction": 1 / 6,
        "zero_variance_groups": 1, "zero_variance_fraction": 1 / 3,
        # acting: 10 (+, clipped), 2 (-), 4 (+), 8 (-, clipped); median 6
        "clip_fraction_positive": 0.5, "clip_fraction_negative": 0.5,
        "clip_fraction_positive_short": 0, "clip_fraction_positive_long": 1,
        "clip_fraction_negative_short": 0, "clip_fraction_negative_long": 1,
        "clip_fraction_short": 0, "clip_fraction_long": 1,
        "drift_kappa": 0,  # of five responses: -1 (2) and +1 (4) are left
    })  # fmt: skip
    json.dumps(metrics, allow_nan=False)


def test_weights_by_length_quartile_and_the_push_on_the_length():
    """Acting: 10 (+), 2 (-), 4 (+), 8 (-), one in each quarter; weights 0.1 x 10, 0.5 x 2, 0.25 x 4, 0 x 8."""
    metrics = step_statistics(**STEP, token_weights=[0.1, 0.5, 0.25, 0.0, 7.0, 9.0])
    overall = 3 / 24
    assert [metrics[f"token_weight_q{i}"] for i in (1, 2, 3, 4)] == pytest.approx(
        [0.5 / overall, 0.25 / overall, 0, 0.1 / overall])
    mean = 30 / 5  # of the responses that are not empty
    push = 1 * 0.1 * (1 - 10 / mean) - 0.5 * (1 - 2 / mean) + 0.25 * (1 - 4 / mean)
    assert metrics["length_drift"] == pytest.approx(push / 5) and push < -0.1
    even = step_statistics(**STEP, token_weights=[1.0] * 6)
    assert [even[f"token_weight_q{i}"] for i in (1, 2, 3, 4)] == pytest.approx([1] * 4)
    assert "token_weight_q1" not in step_statistics(**STEP, token_weights=[0.0] * 6)
    same = step_statistics(**STEP | {"lengths": [3] * 6}, token_weights=[1.0] * 6)
    assert same["token_weight_q1"] == 1 and "token_weight_q4" not in same and same["length_drift"] == 0


def test_rollout_kl():
    """Means over tokens, not of sequence means."""
    old, rollout = [[-1.0, -2.0], [-0.5], []], [[-1.2, -1.9], [-0.5], []]
    metrics = step_statistics(**{k: v[:3] for k, v in STEP.items()}, rollout_logprobs=rollout, old_logprobs=old)
    d = (0.2, -0.1, 0.0)
    assert metrics["kl_rollout_k1"] == pytest.approx(-sum(d) / 3, rel=1e-12)
    assert metrics["kl_rollout_k3"] == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 3, rel=1e-10)
    assert metrics["logprob_difference_max"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="tokens"):
        step_statistics(**STEP, rollout_logprobs=[[-1.0]], old_logprobs=[[-1.0, -2.0]])


def test_nothing_to_average_is_left_out():
    silent = step_statistics(**STEP | {"advantages": [0.0] * 6, "correct": [False] * 6}, clipped=[0] * 6)
    assert "length_mean_correct" not in silent and not any(key.startswith("clip") for key in silent)
    assert silent["zero_variance_fraction"] == 1
    assert step_statistics(**{k: [] for k in STEP}) == {}
