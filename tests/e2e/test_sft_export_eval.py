"""`luspo sft`, `luspo export` and `luspo eval`, one after the other as in a project.

Export against transformers: the exported folder's log-probs of given sequences equal those of the actor that was
exported, in another layout than the one it was trained in.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.actor_jobs import Case
from tests.e2e import jobs
from tests.e2e.conftest import Run
from tests.e2e.project import LAYOUTS, Project, command, luspo, rows, tensors, untimed
from tests.tiny import samples_of
from tests.workers import pool


@pytest.fixture(scope="module")
def supervised(project: Project) -> Path:
    """Six steps of `luspo sft`, saved after 3 and 6."""
    run_dir = project.folder / "sft"
    luspo(project.sft(run_dir, *LAYOUTS["tp2ep2"], "--checkpoint.every", "3"), project.folder / "sft-output")
    return run_dir


def test_sft_learns(supervised: Path) -> None:
    losses = [row["loss"] for row in rows(supervised)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    state = json.loads((supervised / "checkpoints" / "step-000006" / "state.json").read_text())
    assert state["step"] == 6 and state["layout"]["tp"] == 2


def test_sft_stopped_and_resumed_equals_uninterrupted(project: Project, supervised: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "sft"
    shutil.copytree(supervised, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-000006")
    shutil.rmtree(run_dir / "export")
    luspo(["sft", "--config", str(supervised / "config.yaml"), "--run.dir", str(run_dir)], tmp_path / "output")
    assert untimed(rows(run_dir)) == untimed(rows(supervised))
    for name, value in tensors(supervised / "export").items():
        np.testing.assert_array_equal(tensors(run_dir / "export")[name], value, err_msg=name)


def test_sft_saves_on_ctrl_c(project: Project, tmp_path: Path) -> None:
    run_dir = tmp_path / "sft"
    with command(project.sft(run_dir, "--run.steps", "100000"), tmp_path / "output") as run:
        run.until(lambda: "demonstrations, layout" in run.stdout)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.said
        run.assert_nothing_left()
    step = int(re.search(r"stopped after step (\d+); to go on: luspo sft --config", run.stdout)[1])  # type: ignore[index]
    assert (run_dir / "checkpoints" / f"step-{step:06d}" / "state.json").is_file()
    assert not (run_dir / "export").exists()


def test_an_export_has_the_actors_logprobs(project: Project, straight: Run, tmp_path: Path) -> None:
    """The checkpoint was written under TP2 x EP2 and is exported by one process; the run's own export came from two."""
    out = tmp_path / "hf"
    out.mkdir()  # an empty folder is fine
    exported = luspo(["export", "--checkpoint", str(straight.dir), "--out", str(out)], tmp_path / "output")
    assert "exported" in exported.stdout
    ours, theirs = tensors(out), tensors(straight.dir / "export")
    assert ours.keys() == theirs.keys() == tensors(project.model).keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    changed = [name for name, value in tensors(project.model).items() if np.abs(value - ours[name]).max() > 1e-4]
    assert len(changed) > len(ours) * 0.9, "training has changed the weights"

    samples = samples_of(seed=4, groups=3)
    checkpoint = straight.dir / "checkpoints" / "step-000006"
    case = Case(world=2, tp=2, ep=2)
    actor = pool(2).run(jobs.checkpoint_logprobs, case, project.model, checkpoint, samples)[0]
    want = hf_logprobs(out, samples)
    for i, values in enumerate(want):
        assert np.abs(actor[i] - values).max() <= 1e-5
    assert max(np.abs(a - b).max() for a, b in zip(hf_logprobs(project.model, samples), want, strict=True)) > 1e-3


def hf_logprobs(folder: Path, samples: list[Any]) -> list[np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])
            logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)[len(sample.prompt_ids) - 1 :]
            out.append(logp.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0].numpy())
    return out


def test_eval_of_a_checkpoint_equals_eval_of_its_export(project: Project, straight: Run, tmp_path: Path) -> None:
    """And the run's own evaluation at the end would be the same: one seed, one set of held-out prompts."""
    luspo(project.eval(tmp_path / "a", "--checkpoint", str(straight.dir)), tmp_path / "out-a")
    luspo(project.eval(tmp_path / "b", "--model.hf", str(straight.dir / "export")), tmp_path / "out-b")
    first, second = (json.loads((tmp_path / name / "eval.json").read_text()) for name in "ab")
    assert first == second
    assert first["n"] == 6 and 0 < first["greedy"] < 1 and 0 < first["pass_at_1"] < 1
    untrained = tmp_path / "c"
    luspo(project.eval(untrained, "--model.hf", str(project.model)), tmp_path / "out-c")
    assert json.loads((untrained / "eval.json").read_text()) != first
