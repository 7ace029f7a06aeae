"""metrics.jsonl, samples.jsonl and TensorBoard: resume, NaN, torn lines, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from luspo_megatron.report.metrics import METRICS, MetricSinks, format_metric, ordered
from luspo_megatron.report.records import cut_after_step, read_lines, write_atomic
from luspo_megatron.report.watch import MetricWatch


def strict(line: str) -> dict:
    """A JSON reader that refuses NaN and Infinity, as other languages' readers do."""
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def step_metrics(step: int) -> dict[str, float]:
    return {"loss": 1.0 / (step + 1), "reward_mean": 0.1 * step, "num_updates": 2, "seconds/train": 0.5}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    if tag not in accumulator.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_rows_are_written_at_once_in_table_order(tmp_path: Path) -> None:
    with MetricSinks(tmp_path, tensorboard=False) as sinks:
        sinks.write(1, {"zzz_extra": 3, "loss": np.float32(0.5), "reward_mean": 0.25, "num_updates": np.int64(2)})
        text = (tmp_path / "metrics.jsonl").read_text()  # before close: flushed
    row = strict(text)
    assert list(row) == ["step", "reward_mean", "loss", "num_updates", "zzz_extra"]
    assert row == {"step": 1, "reward_mean": 0.25, "loss": 0.5, "num_updates": 2, "zzz_extra": 3}


def test_resumed_files_equal_an_uninterrupted_run(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with MetricSinks(whole, tensorboard=False) as sinks:
        for step in range(7):
            sinks.write(step, step_metrics(step))
            sinks.write_samples(step, [{"prompt": f"p{step}", "response": "r", "reward": 1.0, "length": 1}])
    with MetricSinks(resumed, tensorboard=False) as sinks:
        for step in range(6):  # steps 4 and 5 come after the checkpoint of step 3
            sinks.write(step, {**step_metrics(step), "loss": 99.0} if step > 3 else step_metrics(step))
            sinks.write_samples(step, [{"prompt": f"p{step}", "response": "r", "reward": 1.0, "length": 1}])
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    with MetricSinks(resumed, tensorboard=False, resume_step=3) as sinks:
        for step in range(4, 7):
            sinks.write(step, step_metrics(step))
            sinks.write_samples(step, [{"prompt": f"p{step}", "response": "r", "reward": 1.0, "length": 1}])
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()


def test_resume_completes_a_last_line_without_newline(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}')
    with MetricSinks(tmp_path, tensorboard=False, resume_step=2) as sinks:
        sinks.write(3, {"loss": 3.0})
    assert [strict(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_the_same_step_again_completes_its_row_also_after_a_resume(tmp_path: Path) -> None:
    with MetricSinks(tmp_path, tensorboard=False) as sinks:
        sinks.write(1, {"loss": 0.123456789, "reward_mean": 1.0})
        sinks.write(2, {"loss": 0.5})
        sinks.write(2, {"seconds/save": 0.1})
    with MetricSinks(tmp_path, tensorboard=False, resume_step=2) as sinks:
        sinks.write(2, {"loss": None, "eval/pass_at_1": 0.25})
    rows = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "reward_mean": 1.0, "loss": 0.123456789},
                    {"step": 2, "loss": None, "seconds/save": 0.1, "eval/pass_at_1": 0.25}]


def test_an_earlier_step_is_refused(tmp_path: Path) -> None:
    with MetricSinks(tmp_path, tensorboard=False) as sinks:
        sinks.write(2, {"loss": 1.0})
        with pytest.raises(ValueError, match="step 1 after step 2"):
            sinks.write(1, {"loss": 1.0})


def test_a_new_run_keeps_the_old_files(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        with MetricSinks(tmp_path, tensorboard=True) as sinks:
            sinks.write(1, {"loss": loss})
    losses = [strict((tmp_path / name).read_text())["loss"]
              for name in ("metrics.jsonl.1", "metrics.jsonl.2", "metrics.jsonl")]
    assert losses == [1.0, 2.0, 3.0]
    assert scalars(tmp_path / "tensorboard", "loss") == [(1, 3.0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), np.float64("inf")])
def test_what_is_not_finite_becomes_null_with_a_warning(tmp_path: Path, value: float) -> None:
    said: list[str] = []
    with MetricSinks(tmp_path, tensorboard=True, warn=said.append) as sinks:
        sinks.write(1, {"gradient_norm": value, "loss": 1.0})
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.0, "gradient_norm": None}
    assert len(said) == 1 and "gradient_norm" in said[0]
    assert scalars(tmp_path / "tensorboard", "gradient_norm") == []


def test_nested_nan_and_half_characters_stay_valid_json(tmp_path: Path) -> None:
    with MetricSinks(tmp_path, tensorboard=False, warn=lambda text: None) as sinks:
        sinks.write(1, {"per_layer": [1.0, float("nan")]})
        sinks.write_samples(1, [{"prompt": "\ud83d half", "response": "Zürich\u2028\x1b[31m", "reward": float("nan")}])
    assert strict((tmp_path / "metrics.jsonl").read_text())["per_layer"] == [1.0, None]
    sample = strict((tmp_path / "samples.jsonl").read_text(encoding="utf-8"))
    assert sample == {"step": 1, "prompt": "\ud83d half", "response": "Zürich\u2028\x1b[31m", "reward": None}


def test_tensorboard_values_come_back_and_a_resume_hides_later_points(tmp_path: Path) -> None:
    with MetricSinks(tmp_path) as sinks:
        for step in range(6):
            sinks.write(step, {"loss": float(step), "eval/pass_at_1": 0.5, "lr": None})
    with MetricSinks(tmp_path, resume_step=3) as sinks:
        sinks.write(4, {"loss": 40.0})
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert scalars(folder, "eval/pass_at_1") == [(step, 0.5) for step in range(4)]


def test_cutting_drops_what_cannot_be_read_and_leaves_the_rest_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"step":1,   "a": 1e0}\n\xff\xfe\n[1]\n{"a": 2}\n{"step": true}\n{"step": 2}\n{"step": 3}\n')
    assert cut_after_step(path, 2) == 5
    assert path.read_bytes() == b'{"step":1,   "a": 1e0}\n{"step": 2}\n'
    assert read_lines(path) == ([{"step": 1, "a": 1.0}, {"step": 2}], 0)


def test_atomic_writing_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, 5)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]


def test_the_table_is_complete_and_formats_values() -> None:
    for name, spec in METRICS.items():
        assert name == spec.name and spec.description and spec.normaliser
        assert format_metric(name, None) == format_metric(name, float("nan")) == "-" != format_metric(name, 0.5)
    assert format_metric("pass_rate", 0.1234) == "12.3%"
    assert format_metric("num_updates", 2.0) == "2"
    assert format_metric("kl_rollout", 3.21e-7) == "3.2e-07"
    assert format_metric("somebody/else", 1234.5678) == "1235"
    assert list(ordered({"b": 1, "a": 1, "loss": 1, "reward_mean": 1})) == ["reward_mean", "loss", "a", "b"]


def test_constant_rewards_are_warned_about_loudly() -> None:
    said: list[str] = []
    watch = MetricWatch(said.append, patience=3)
    for value in (1.0, 1.0, 0.5, 1.0, 1.0):
        watch.observe({"zero_variance_fraction": value, "reward_mean": 0.0})
    assert said == []  # never three in a row
    watch.observe({"zero_variance_fraction": 1.0, "reward_mean": 0.0})
    assert len(said) == 1 and "reward.answer_pattern" in said[0]
    watch.observe({"zero_variance_fraction": 1.0, "reward_mean": 0.0})
    assert len(said) == 1  # not at every step
    for _ in range(3):
        watch.observe({"truncated_fraction": 0.95, "kl_rollout": 0.5})
    assert len(said) == 3


def lengths(*values: float, **more: float) -> list[dict[str, float]]:
    return [{"response_length_mean": value, "pass_rate": 0.5, **more} for value in values]


def test_a_collapsing_length_is_said_in_words() -> None:
    said: list[str] = []
    watch = MetricWatch(said.append, patience=3)
    for row in lengths(*[30.0] * 5, *[25.0] * 10):
        watch.observe(row)
    assert said == []
    causes = {"token_weight_q1": 2.0, "token_weight_q4": 0.5, "drift_kappa": 0.02, "clip_fraction_positive": 0.1,
              "clip_fraction_negative": 0.2, "clip_fraction_negative_short": 0.4, "clip_fraction_negative_long": 0.0,
              "clip_fraction_positive_short": 0.1, "clip_fraction_positive_long": 0.1}
    causes |= {"response_length_correct": 9.0, "response_length_wrong": 12.0}
    for row in lengths(*[10.0] * 12, **causes):
        watch.observe(row)
    assert len(said) == 1  # once, not at every step
    for part in ("length collapse: responses shrank from 30.0 to", "(4.0 times as much)",
                 "divides by the response length (gspo, grpo)", "with luspo only the clip can",
                 "the reward itself asks for shorter ones",
                 "20.0% of the negative", "bring algorithm.clip_low and clip_high closer"):
        assert part in said[0], part


def test_an_exploding_length_is_said_and_survives_a_resume() -> None:
    said: list[str] = []
    watch = MetricWatch(said.append, patience=3)
    watch.recall(lengths(*[30.0] * 50))
    assert said == []
    for row in lengths(*[70.0] * 8, truncated_fraction=0.4):
        watch.observe(row)
    assert len(said) == 1 and "length explosion: responses grew from 30.0" in said[0]
    assert "40.0% of the responses are cut off" in said[0] and "clip" not in said[0]
    fresh = MetricWatch(said.append, patience=3)
    for row in lengths(*[70.0] * 20):
        fresh.observe(row)
    assert len(said) == 1


def test_the_report_imports_neither_torch_nor_megatron(tmp_path: Path) -> None:
    code = ("import sys\n"
            "from luspo_megatron.report import charts, environment, html, metrics, progress, summary, svg, watch\n"
            f"sinks = metrics.MetricSinks({str(tmp_path)!r})\nsinks.write(1, {{'loss': 1.0}})\nsinks.close()\n"
            f"environment.write_environment({str(tmp_path)!r})\nhtml.write_report({str(tmp_path)!r})\n"
            "print([name for name in ('torch', 'megatron', 'tensorflow', 'transformers') if name in sys.modules])\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
