"""The length-bias study: the exact drift, the tabular policy by explicit loops, whole small studies, their pages.

Not covered here: that GSPO shrinks and LUSPO does not over 200 rollouts (docs/length_bias.md has the figures).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from luspo_megatron import cli
from luspo_megatron.algorithm.statistics import analytic_length_drift
from luspo_megatron.config import AlgorithmConfig
from luspo_megatron.config_tools import LengthBiasConfig, ModelStudyConfig, algorithms_of, check_length_bias, variant
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.study import model
from luspo_megatron.study.drift import objective_drift
from luspo_megatron.study.length_bias import all_runs, run_one, variants
from luspo_megatron.study.outcome import find, findings, outcomes, seeds_ahead
from luspo_megatron.study.tabular import NO_HINT, STOP, THINKING, TabularPolicy, sample, start_accuracy
from tests.unit.test_report_html import parse

SMALL = LengthBiasConfig(steps=10, prompts=16, prompts_per_mini_batch=8, seeds=2, algorithms="luspo,gspo,grpo",
                         workers=1)


# --- the exact drift --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [(1 / 16, 0.5, 0.15, 0.19), (1 / 4, 0.3, 0.4, 0.1), (1 / 7, 0.8, 0.0, 1.0)])
def test_the_objective_drifts_as_the_closed_form_says(case):
    exact = analytic_length_drift(*case)
    assert objective_drift("gspo", *case) == pytest.approx(exact.gspo, rel=1e-12, abs=1e-14)
    assert abs(objective_drift("luspo", *case)) < 1e-15 < 1e-5 < abs(exact.gspo)
    assert objective_drift("grpo", *case) == pytest.approx(exact.gspo, rel=1e-12)  # with the same clipped shares


def test_the_published_drift_value():
    assert objective_drift("gspo", 1 / 16, 0.5, 0.15, 0.19) == pytest.approx(0.00244678496299, abs=1e-12)
    assert objective_drift("gspo", 1 / 16, 0.5, 0.2, 0.2) == pytest.approx(0, abs=1e-15)  # equal clip fractions


def test_drift_refuses_what_it_cannot_say():
    with pytest.raises(ValueError, match="mean over sequences"):
        objective_drift("dapo", 0.5, 0.5, 0.1, 0.1)
    with pytest.raises(ValueError, match="inside"):
        objective_drift("luspo", 1.0, 0.5, 0.1, 0.1)


# --- policy and task --------------------------------------------------------------------------------------------------


def test_a_rollout_by_explicit_loops():
    policy = TabularPolicy(limit=8, start_length=6.0)
    rollout = sample(policy, "neutral", 40, 4, torch.Generator().manual_seed(3))
    stopped = 0
    for tokens, mask, length, truncated in zip(rollout.tokens.tolist(), rollout.mask.tolist(), rollout.lengths.tolist(),
                                               rollout.truncated.tolist(), strict=True):
        thinking = [index % THINKING for index in tokens[:8]]
        assert [index // THINKING for index in tokens[:8]] == list(range(8))
        first = thinking.index(STOP)
        assert truncated == (first == 7)
        counted = list(range(first if truncated else first + 1))
        assert [i for i in range(8) if mask[i]] == counted and mask[8] and length == len(counted) + 1
        stopped += truncated
    assert 0 < stopped < 160
    rows = torch.tensor([3, 0, 7])
    packed, cu_seqlens = rollout.pack(rows)
    expected = [index for row in rows.tolist() for index, counts in
                zip(rollout.tokens[row].tolist(), rollout.mask[row].tolist(), strict=True) if counts]
    assert packed.tolist() == expected
    assert cu_seqlens.diff().tolist() == rollout.lengths[rows].tolist()


def test_the_start_is_as_asked():
    policy = TabularPolicy(limit=400, start_length=16.0)
    rollout = sample(policy, "neutral", 1000, 8, torch.Generator().manual_seed(0))
    lengths, correct = rollout.lengths.double(), rollout.correct.double()
    assert lengths.mean().item() == pytest.approx(16, abs=4 * 15 / math.sqrt(8000))
    assert correct.mean().item() == pytest.approx(start_accuracy(), abs=0.03)
    table = policy.table()
    assert table[: 400 * THINKING].reshape(400, THINKING).exp().sum(1).tolist() == pytest.approx([1] * 400)
    assert table[400 * THINKING:].reshape(NO_HINT + 1, -1).exp().sum(1).tolist() == pytest.approx([1] * 11)


def test_only_the_need_task_pays_for_length():
    policy = TabularPolicy(limit=64, start_length=16.0)
    gaps = {}
    for task in ("neutral", "need"):
        rollout = sample(policy, task, 500, 8, torch.Generator().manual_seed(1))
        lengths = rollout.lengths.double()
        gaps[task] = (lengths[rollout.correct].mean() - lengths[~rollout.correct].mean()).item()
    assert abs(gaps["neutral"]) < 1.5 < 3 < gaps["need"]


# --- runs -------------------------------------------------------------------------------------------------------------


def plain(row):
    return {name: value for name, value in row.items() if name != "cpu_seconds"}


def test_runs_repeat_and_share_their_start():
    found = {v.algorithm: run_one(SMALL, v, 0) for v in variants(SMALL) if v.clip == "usual"}
    again = run_one(SMALL, variants(SMALL)[0], 0)
    assert plain(again) == plain(found["luspo"])
    starts = {(row["length_start"], row["accuracy_start"]) for row in found.values()}
    assert len(starts) == 1 and len({row["length_end"] for row in found.values()}) == 3
    other = run_one(SMALL, variants(SMALL)[0], 1)
    assert other["length_start"] != again["length_start"]
    curve = found["gspo"]["curve"]
    assert len(curve["response_length_mean"]) == 11 and curve["step"] == list(range(11))
    assert curve["clip_fraction_negative"][-1] is None  # the last rollout is only measured
    assert found["gspo"]["clip_negative"] > 0.05 > found["grpo"]["clip_negative"]
    curves = {name: row["curve"] for name, row in found.items()}
    first = {name: curve["token_weight_q1"][0] / curve["token_weight_q4"][0] for name, curve in curves.items()}
    assert first["luspo"] < 1.2 and first["gspo"] > 2 and first["grpo"] > 2


def test_worker_processes_change_nothing():
    config = dataclasses.replace(SMALL, algorithms="luspo", wide_clip=False)
    told = []
    rows = list(all_runs(dataclasses.replace(config, workers=2), told.append))
    expected = [run_one(config, variants(config)[0], seed) for seed in (0, 1)]
    assert sorted(map(repr, map(plain, rows))) == sorted(map(repr, map(plain, expected)))
    assert 0 < sum(told) <= 20


def test_a_whole_small_study(tmp_path, capsys):
    flags = ["--steps", "10", "--prompts", "16", "--seeds", "2", "--algorithms", "luspo,gspo,grpo", "--workers", "1"]
    assert cli.main(["study", "length-bias", *flags, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "LUSPO, wide clip" in shown and "10 runs" in shown
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert {(row["algorithm"], row["clip"], row["seed"]) for row in rows} == {
        (name, clip, seed) for seed in (0, 1) for name, clip in
        (("luspo", "usual"), ("gspo", "usual"), ("grpo", "usual"), ("luspo", "wide"), ("gspo", "wide"))}
    needed = {"algorithm", "seed", "length_start", "length_end", "accuracy_start", "accuracy_end", "clip_positive",
              "clip_negative", "curve"}
    assert all(needed <= row.keys() for row in rows)
    page, html = parse(tmp_path / "report.html")
    text = " ".join(page.text)
    for part in ("0.00244678496299", "LUSPO, wide clip", "Clipped, advantage < 0, shorter half", "Gradient norm",
                 "What this does and does not show", "its clip is not", "2 seeds"):
        assert part in text, part
    for name in ("length", "wide_clip", "accuracy", "clip", "gradient_norm"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert cli.main(["study", "length-bias", *flags, "--out", str(tmp_path)]) == 0  # the old rows are kept aside
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 10 and (tmp_path / "runs.jsonl.1").exists()


def row(algorithm, seed, end, clip="usual", negative=0.2, positive=0.1):
    curve = {"step": [0], "clip_fraction_negative_short": [0.4], "clip_fraction_positive_short": [0.0]}
    return {"algorithm": algorithm, "clip": clip, "seed": seed, "length_start": 16.0, "length_end": end,
            "accuracy_start": 0.3, "accuracy_end": 0.5, "clip_positive": positive, "clip_negative": negative,
            "clip_low": 0.01, "clip_high": 0.04, "curve": curve}


def test_findings_follow_from_the_numbers():
    rows = [row("luspo", 0, 16.5), row("luspo", 1, 9.0), row("gspo", 1, 10.0), row("gspo", 0, 11.0),
            row("luspo", 0, 8.0, clip="wide")]
    found = outcomes(rows)
    assert seeds_ahead(found) == (1, 2) and seeds_ahead(found, "wide") is None
    gspo = find(found, "gspo")
    assert gspo is not None and gspo.change == pytest.approx(10.5 / 16 - 1) and gspo.ends == [11.0, 10.0]
    text = " ".join(findings(SMALL, found))
    assert "LUSPO ended longer than GSPO in 1 of 2 seeds" in text and "16.0 to 10.5 tokens (-34%)" in text
    assert "It shrinks although its weight is unbiased" in text and "40.0% of the negative" in text
    grown = " ".join(findings(SMALL, outcomes([row("gspo", 0, 20.0), row("luspo", 0, 16.0, clip="wide")])))
    assert "shrinks" not in grown and "favours the tokens of short" not in grown


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "text"), [
    (["--algorithms", "luspo,gpso"], "unknown objective 'gpso'; did you mean gspo?"),
    (["--algorithms", "luspo,luspo"], "given twice"), (["--algorithms", ","], "--algorithms is empty"),
    (["--seeds", "0"], "--seeds 0: give 1 or more"), (["--prompts", "60"], "no multiple of --prompts_per_mini_batch 8"),
    (["--start_length", "90"], "--start_length 90.0"), (["--task", "easy"], "--task takes one of neutral, need"),
    (["--lr", "0"], "--lr 0.0"), (["--clip_low", "1.5"], "--clip_low 1.5"), (["--out", ""], "--out is empty"),
])
def test_mistakes_are_one_message(flags, text, capsys):
    assert cli.main(["study", "length-bias", *flags]) == 2
    assert text in capsys.readouterr().err


def test_several_mistakes_are_told_at_once():
    with pytest.raises(UserError) as caught:
        check_length_bias(LengthBiasConfig(seeds=0, lr=-1, group_size=1))
    assert len(str(caught.value).splitlines()) == 3
    assert algorithms_of(" luspo, grpo ") == ["luspo", "grpo"]


def test_which_studies_there_are(capsys):
    assert cli.main(["study", "--help"]) == 0 and "length-bias" in capsys.readouterr().out
    assert cli.main(["study"]) == 2 and "length-bias" in capsys.readouterr().err
    assert cli.main(["study", "lenght-bias"]) == 2 and "did you mean length-bias?" in capsys.readouterr().err


# --- the study on a model ---------------------------------------------------------------------------------------------


def test_runs_of_the_model_study_differ_in_objective_and_clip_only():
    config = ModelStudyConfig(out="o", algorithm=AlgorithmConfig(clip_low=1e-3, epochs=2))
    luspo, grpo = (model.run_config(config, name, 5) for name in ("luspo", "grpo"))
    assert (luspo.run.dir, luspo.run.seed, luspo.algorithm.clip_low) == ("o/luspo-seed5", 5, 1e-3)
    assert (grpo.algorithm.objective, grpo.algorithm.clip_low, grpo.algorithm.clip_high) == ("grpo", 0.2, 0.28)
    assert dataclasses.replace(grpo, run=luspo.run, algorithm=luspo.algorithm) == luspo
    assert variant(config.algorithm, "gspo", (0.2, 0.3)).clip_low == 1e-3 and grpo.algorithm.epochs == 2


def fake_run(folder: Path, objective: str, seed: int, end: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {{seed: {seed}, steps: 12}}\nalgorithm: {{objective: {objective}}}\n")
    rows = [{"step": 0, "eval/pass_at_1": 0.4}]
    rows += [{"step": s, "response_length_mean": 20 + (end - 20) * (s > 6), "pass_rate": 0.5} for s in range(1, 13)]
    rows[-1]["eval/pass_at_1"] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"finished": True, "steps": 12}))


def test_the_report_of_a_model_study(tmp_path, capsys):
    ends = {("luspo", 0): 21.0, ("luspo", 1): 19.0, ("gspo", 0): 15.0, ("gspo", 1): 19.5}
    for (objective, seed), end in ends.items():
        fake_run(tmp_path / f"{objective}-seed{seed}", objective, seed, end)
    config = ModelStudyConfig(out=str(tmp_path), algorithms="luspo,gspo,grpo", seeds=2, report_only=True)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.config_checks, "validate", lambda job: [])
        assert model.main(config) == 0
    text = " ".join(parse(tmp_path / "report.html")[0].text)
    for part in ("LUSPO ended longer than GSPO in 1 of 2 seeds", "20.0 to 17.2 tokens (-14%; by seed 15.0 to 19.5)",
                 "held-out pass rate 40.0% to 50.0%", "2 of the 6 planned runs are not complete", "gspo-seed1"):
        assert part in text, part
    assert "1 of 2 seeds" in capsys.readouterr().out


def test_a_failed_training_run_ends_the_study_with_its_last_words(tmp_path):
    config = model.run_config(ModelStudyConfig(out=str(tmp_path)), "luspo", 0)  # names no model
    with pytest.raises(RunError, match="(?s)luspo-seed0 ended with exit code 2.*--model.hf"):
        model.train(config, type("Phase", (), {"advance": lambda self, n=1: None})())
