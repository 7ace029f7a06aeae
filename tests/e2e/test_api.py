"""docs/api.md, run as it stands in a folder with a model and prompts; and what a mistake looks like from Python."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import luspo_megatron
from luspo_megatron import Config, RunResult, load, train
from luspo_megatron.config_io import load_config
from luspo_megatron.errors import RunError, UserError
from tests.e2e.project import ROOT, Project, rows

DOCUMENT = ROOT / "docs/api.md"


def test_no_module_hides_a_name_of_the_interface() -> None:
    modules = {module.name for module in pkgutil.iter_modules(luspo_megatron.__path__)}
    assert "api" in modules and not modules & set(luspo_megatron._API)


def test_the_notebook_of_the_document(project: Project, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert [name for name, _ in blocks] == ["notebook.py", "my_reward.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    (tmp_path / "model").symlink_to(project.model)
    (tmp_path / "prompts.jsonl").symlink_to(project.prompts)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, env=env, capture_output=True, text=True,
                          timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/notebook"
    metrics = rows(run)
    said = [f"step {row['step']}: reward {row['reward_mean']:.2f}, {row['response_length_mean']:.1f} tokens"
            for row in metrics]
    assert len(said) == 3 and done.stdout.splitlines()[-5:] == [
        *said, "report: runs/notebook/report.html", "trained policy: runs/notebook/export"]
    assert list((run / "export").glob("*.safetensors")) and "layout tp2xep2" in done.stdout
    assert {row["expert_load_max"] >= 1 for row in metrics} == {True}


def test_load_is_flags_and_files(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("optimizer: {lr: 2e-6}\nparallel: {tp: 2, world_size: 2}\n")
    terms = ["math:1.0", "length:0.5"]
    config = load(file, optimizer={"beta1": 0.8}, run={"resume": False}, reward={"terms": terms})
    assert config == load_config(Config, ["--config", str(file), "--optimizer.beta1", "0.8", "--run.no_resume",
                                          "--reward.terms", *terms])
    for wrong, says in (({"optimizer": {"lrr": 1}}, "optimizer.lr"), ({"optimizer": 1}, "by section")):
        with pytest.raises(UserError, match=says):
            load(**wrong)


def test_mistakes_raise(project: Project, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="parallel.tp"):
        train(load(model={"hf": project.model}, parallel={"tp": 3, "world_size": 3}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\nnot json\n')
    config = load_config(Config, project.train(tmp_path / "run", "--data.prompts", str(prompts))[1:])
    with pytest.raises(UserError, match="prompts.jsonl"):
        train(config, quiet=True)
    with pytest.raises(RunError, match="start_timeout"):
        train(load_config(Config, project.train(tmp_path / "run2", "--rollout.start_timeout", "0.01")[1:]), quiet=True)


def test_the_package_has_no_other_names() -> None:
    import luspo_megatron

    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        luspo_megatron.Trainer  # noqa: B018
    assert RunResult.__dataclass_fields__.keys() == {"dir", "metrics", "summary"}
