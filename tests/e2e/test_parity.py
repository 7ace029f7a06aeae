"""`luspo parity` as a person runs it: equal parties pass; a wrong weight and wrong numerics are told apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.project import Command, Project

TP2EP2 = ["--parallel.world_size", "2", "--parallel.tp", "2", "--parallel.ep", "2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("parity"))


def arguments(project: Project, out: Path, *flags: str) -> list[str]:
    return ["parity", "--out", str(out), "--model.hf", str(project.model), "--prompts", "3", "--samples", "2",
            "--rollout.max_response_tokens", "10", "--rollout.temperature", "0.6", "--data.max_prompt_tokens", "64",
            "--batch.max_tokens_per_micro_batch", "128", "--weight_sync.bucket_bytes", "20000", *flags]


def test_equal_parties_pass(project: Project, tmp_path: Path) -> None:
    command = Command(arguments(project, tmp_path / "out", *TP2EP2), tmp_path / "scratch")
    assert command.wait(500) == 0, command.said
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["good"] and len(report["checks"]) == 2
    for check in report["checks"]:
        assert check["weights"]["equal"] and check["weights"]["compared"] > 20
        assert check["numerics"]["max"] <= 1e-5 and check["numerics"]["tokens"] > 6
    for text in ("Hugging Face / actor", "actor / engine-0", "equal within 1e-05", "temperature 0.6"):
        assert text in command.stdout


def test_another_weight_is_blamed_by_name(project: Project, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(project.model, other)
    [path] = other.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[name].view(-1)[17] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    command = Command(arguments(project, tmp_path / "out", "--push", "false", "--reference", "false",
                                "--rollout.engine", "tests.e2e.parity_engines:OTHER_MODEL"),
                      tmp_path / "scratch", PARITY_OTHER_MODEL=str(other))
    assert command.wait(500) == 1, command.said
    assert "the WEIGHTS differ" in command.stdout and name in command.stdout and "NUMERICS" not in command.stdout
    assert "1 of " in command.stdout and "Traceback" not in command.said


def test_another_temperature_is_numerics(project: Project, tmp_path: Path) -> None:
    command = Command(arguments(project, tmp_path / "out", "--reference", "false", "--rollout.engine",
                                "tests.e2e.parity_engines:HOT"), tmp_path / "scratch")
    assert command.wait(500) == 1, command.said
    assert "the weights are equal, the NUMERICS differ" in command.stdout and "WEIGHTS" not in command.stdout
    assert "Traceback" not in command.said
