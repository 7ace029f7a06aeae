"""Bad input: one clear message, exit code 2, no traceback, and an existing run folder stays as it was.

What the configuration and the files themselves show is refused before any process is started; these tests forbid the
launch. What only the controller can see (a person's own reward) is shown on a real start over an existing run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from luspo_megatron import cli
from luspo_megatron.launch import local
from tests.e2e.conftest import Run
from tests.e2e.project import LAYOUTS, Project, contents, luspo

WEIGHTS = "model.safetensors"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with a checkpoint, metrics and settings of an earlier run."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-000003" / "dist").mkdir(parents=True)
    for name in ("checkpoints/step-000003/state.json", "checkpoints/step-000003/dist/x", "metrics.jsonl",
                 "config.yaml", "export"):
        (folder / name).write_text(f'{{"step": 3, "of": "{name}"}}\n')
    return folder


@pytest.fixture
def refused(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command that must be refused before anything starts; gives the message."""
    def launched(*_: object, **__: object) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr(local, "launch", launched)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(arguments: list[str]) -> str:
        before = contents(run_dir, without=())
        capsys.readouterr()
        code = cli.main(arguments)
        out, err = capsys.readouterr()
        assert code == 2, err
        assert "Traceback" not in err and out == ""
        assert err.count("luspo: ") == 1 and err.startswith("luspo: ")
        assert contents(run_dir, without=()) == before
        return err

    return run


@pytest.fixture
def model(project: Project, tmp_path: Path) -> Path:
    """A copy of the model folder to spoil."""
    return Path(shutil.copytree(project.model, tmp_path / "spoilt"))


def test_the_fixture_would_start(project: Project, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without a mistake the same arguments do reach the launcher."""
    reached = []
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local, "launch", lambda *arguments, **_: reached.append(arguments) or 0)
    assert cli.main(project.train(run_dir)) == 0 and cli.main(project.sft(run_dir)) == 0 and len(reached) == 2


@pytest.mark.parametrize(("flags", "says"), [
    (["--optimizer.learning_rate", "1"], "unknown flag --optimizer.learning_rate"),
    (["--run.steps", "many"], "--run.steps takes a whole number, not 'many'"),
    (["--data.prompts", "no/such.jsonl"], "--data.prompts 'no/such.jsonl': there is no such file"),
    (["--data.eval_prompts", "no/such.jsonl"], "--data.eval_prompts 'no/such.jsonl': there is no such file"),
    (["--model.hf", "no/such"], "--model.hf 'no/such': there is no such folder"),
    (["--parallel.world_size", "3", "--parallel.tp", "3"], "--parallel.tp 3: does not divide the model's 4 attention"),
    (["--parallel.world_size", "3", "--parallel.tp", "2"], "--parallel.world_size 3: is not a multiple of tp*cp*pp=2"),
    (["--parallel.world_size", "3", "--parallel.pp", "3"], "--parallel.pp 3: does not divide the model's 2 layers"),
    (["--parallel.world_size", "3", "--parallel.ep", "3"], "--parallel.ep 3: does not divide the model's 8 experts"),
    (["--data.prompt_key", "question"], "no column 'question'; columns found: prompt, answer; set data.prompt_key"),
    (["--data.answer_key", "a"], "no column 'a'; columns found: prompt, answer; set data.answer_key"),
    (["--reward.terms", "maths:1.0"], "--reward.terms 'maths:1.0'"),
    (["--run.resume", "false"], "already holds step-000003; use --run.resume true to go on, or another --run.dir"),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "")
def test_settings_and_files(flags: list[str], says: str, project: Project, run_dir: Path, refused: Any) -> None:
    assert says in refused(project.train(run_dir, *flags))


def test_a_mistake_in_a_file_of_settings(project: Project, run_dir: Path, refused: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("optimizer: {lrate: 1e-6}\n")
    said = refused(project.train(run_dir, "--config", str(tmp_path / "recipe.yaml")))
    assert "recipe.yaml" in said and "lrate" in said


def test_columns_of_demonstrations(project: Project, run_dir: Path, refused: Any) -> None:
    said = refused(project.sft(run_dir, "--data.response_key", "completion"))
    assert "no column 'completion'; columns found: prompt, response; set data.response_key" in said


def test_an_empty_file(project: Project, run_dir: Path, refused: Any, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    assert "has no rows" in refused(project.train(run_dir, "--data.prompts", str(tmp_path / "none.jsonl")))


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) * 2 // 3])


def garble(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 4096)


def drop(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(weights, folder / WEIGHTS)


def rename(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.layers.1.mlp.experts.9.up_proj.weight"] = weights.pop("model.layers.1.mlp.experts.5.up_proj.weight")
    save_file(weights, folder / WEIGHTS)


def reshape(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.norm.weight"] = np.ones(63, np.float32)
    save_file(weights, folder / WEIGHTS)


def index_of(weight_map: Any) -> Any:
    def write(folder: Path) -> None:
        text = weight_map if isinstance(weight_map, str) else json.dumps(weight_map)
        (folder / "model.safetensors.index.json").write_text(text)

    return write


def remove(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))


@pytest.mark.parametrize(("spoil", "says"), [
    (truncate, "model.safetensors: cannot be read as safetensors"),
    (garble, "model.safetensors: cannot be read as safetensors"),
    (drop, "missing: model.layers.1.mlp.experts.5.up_proj.weight"),
    (rename, "unexpected: model.layers.1.mlp.experts.9.up_proj.weight"),
    (reshape, "wrong shape: model.norm.weight (63,) instead of (64,)"),
    (remove, "no .safetensors files"),
    (index_of({"weight_map": {"model.norm.weight": "model-00002.safetensors"}}),
     "files named by the index are missing: model-00002.safetensors"),
    (index_of("{"), "model.safetensors.index.json: is not valid JSON"),
    (index_of({"metadata": {}}), "model.safetensors.index.json: has no weight_map"),
    (architecture, "architecture LlamaForCausalLM is not supported"),
], ids=["truncated", "garbled", "missing", "renamed", "wrong shape", "no weights", "index names a missing file",
        "index is no JSON", "index without map", "architecture"])
def test_models(spoil: Any, says: str, project: Project, model: Path, run_dir: Path, refused: Any) -> None:
    spoil(model)
    for arguments in (project.train(run_dir), project.sft(run_dir)):
        assert says in refused([*arguments, "--model.hf", str(model)])


def test_a_reference_policy_of_another_kind(project: Project, model: Path, run_dir: Path, refused: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    said = refused(project.train(run_dir, "--algorithm.kl_coef", "0.1", "--model.ref_hf", str(model)))
    assert "is built unlike model.hf: vocab_size 300 instead of 301" in said


def test_export_and_eval(project: Project, run_dir: Path, refused: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = ["--out", str(tmp_path / "out")]
    assert "no complete checkpoint" in refused(["export", "--checkpoint", str(tmp_path / "empty"), *out])
    assert "there is no such folder" in refused(["export", "--checkpoint", "no/such", *out])
    assert "not an empty folder" in refused(["export", "--checkpoint", str(run_dir), "--out", str(run_dir)])
    assert "no complete checkpoint" in refused(project.eval(tmp_path / "out", "--checkpoint", str(tmp_path / "empty")))
    assert "--data.eval_prompts" in refused(["eval", "--model.hf", str(project.model), *out])
    assert not (tmp_path / "out").exists()


def test_what_only_the_controller_sees_touches_nothing_of_an_earlier_run(project: Project, straight: Run,
                                                                         tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight.dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-000006")  # so that a resume would cut rows off the metrics
    before = contents(run_dir)
    run = luspo(project.train(run_dir, *LAYOUTS["tp2ep2"], "--reward.terms", "no_such_module:f:1.0"),
                tmp_path / "output", code=2)
    assert run.stderr.startswith("luspo: ") and "no_such_module" in run.stderr and "Traceback" not in run.said
    assert len(run.stderr.splitlines()) <= 3, run.stderr
    assert contents(run_dir) == before
