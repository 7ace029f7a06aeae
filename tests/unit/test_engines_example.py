"""examples/qwen3_moe/engines.sh with a `luspo` that writes down what it is asked: flags, order, the verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luspo_megatron.config import Config, SftConfig
from luspo_megatron.config_io import load_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/qwen3_moe"
LUSPO = """#!{python}
import json, os, pathlib, sys
with open(os.environ["ASKED"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
folder = pathlib.Path(sys.argv[sys.argv.index("--run.dir") + 1])
(folder / "export").mkdir(parents=True, exist_ok=True)
if sys.argv[1] == "train":
    (folder / "summary.json").write_text(json.dumps({{"finished": True}}))
    reward = json.loads(os.environ["REWARDS"])[folder.name]
    rows = [{{"step": 0, "eval/pass_at_1": 0.1}}]
    rows += [{{"step": i, "reward_mean": reward, "logprob_max_diff": 1e-5, "seconds/rollout": 1.0, "seconds/sync": 0.1}}
             for i in range(1, 31)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


def run(folder: Path, *flags: str, **rewards: float) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    out, asked = folder / "out", folder / "asked"
    for name in ("model/config.json", "data/heldout.jsonl"):  # what the demo's own scripts make, which have their tests
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    program = folder / "luspo"
    program.write_text(LUSPO.format(python=sys.executable))
    program.chmod(0o755)
    asked.write_text("")
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(out), "ASKED": str(asked), "REWARDS": json.dumps(rewards),
        "PYTHON": sys.executable, "ENGINE_VENVS": "/venvs", "ENGINES": " ".join(rewards)}
    done = subprocess.run(["bash", str(EXAMPLE / "engines.sh"), *flags], text=True, capture_output=True, check=False,
                          env=os.environ | environment)
    return done, [json.loads(line) for line in asked.read_text().splitlines()]


def test_every_engine_gets_the_same_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, asked = run(tmp_path, "--optimizer.lr", "5e-5", hf=0.41, vllm=0.40, sglang=0.43)
    assert done.returncode == 0, done.stderr
    assert "rewards agree within 0.0323" in done.stdout and "vllm        30  0.4000" in done.stdout
    assert [words[0] for words in asked] == ["sft", "train", "train", "train"]
    monkeypatch.chdir(EXAMPLE.parents[1])
    assert load_config(SftConfig, asked[0][1:]).run.dir == str(tmp_path / "out/sft")
    configs = [load_config(Config, words[1:]) for words in asked[1:]]
    assert [config.rollout.engine for config in configs] == ["hf", "vllm", "sglang"]
    assert [config.rollout.engine_python for config in configs] == ["", "/venvs/vllm/bin/python",
                                                                    "/venvs/sglang/bin/python"]
    for config in configs:
        assert (config.run.steps, config.optimizer.lr, config.parallel.pp) == (30, 5e-5, 2)
        assert config.model.hf == str(tmp_path / "out/sft/export")
    again, asked = run(tmp_path, hf=0.0, vllm=0.0, sglang=0.0)  # all is done already
    assert again.returncode == 0 and asked == [] and again.stdout == done.stdout


def test_an_engine_with_other_rewards_is_found(tmp_path: Path) -> None:
    done, _ = run(tmp_path, hf=0.41, vllm=0.37)
    assert done.returncode == 1 and "rewards do NOT agree within 0.0323" in done.stdout
