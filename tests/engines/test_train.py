"""`luspo train` and `luspo parity` with real engines, as a person runs them; engines that are killed on the way.

One run for each engine: an undisturbed first step, an engine that is killed while it generates, the other while it
receives weights. Killed is the server itself, with SIGKILL.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.project import VOCAB, Command, Project, command, luspo, rows, write_tokenizer
from tests.engines.conftest import python_of
from tests.engines.models import save_model

STEPS, PROMPTS, GROUP = 4, 8, 8


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("project"))
    save_model(made.model, 3)
    write_tokenizer(made.model)
    path = made.model / "generation_config.json"  # many ids end a response, so that lengths differ
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, *range(20, VOCAB, 10)]}))
    return made


def train(project: Project, run_dir: Path, *flags: str) -> list[str]:
    return project.train(run_dir, "--run.steps", str(STEPS), "--rollout.prompts_per_step", str(PROMPTS),
                         "--rollout.group_size", str(GROUP), "--algorithm.prompts_per_mini_batch", "4",
                         "--reward.terms", "tests.engines.rewards:short:1.0", "--optimizer.lr", "1e-5",
                         "--checkpoint.every", "0", "--checkpoint.export_at_end", "false", *flags)


def engine_flags(engine: str) -> list[str]:
    return ["--rollout.engine", engine, "--rollout.engine_python", python_of(engine), "--rollout.start_timeout", "240",
            "--rollout.request_timeout", "120"]


def mean_reward(metrics: list[dict[str, Any]]) -> float:
    return sum(row["reward_mean"] for row in metrics) / len(metrics)


@pytest.fixture(scope="session")
def by_hf(project: Project) -> list[dict[str, Any]]:
    """The same run with the Hugging Face engine."""
    run_dir = project.folder / "hf"
    luspo(train(project, run_dir), project.folder / "hf-output", GRADED=str(project.folder / "hf-graded"))
    return rows(run_dir)


def serving(run: Command) -> list[int]:
    """Pids of the engines' servers (the children of serve.py), by the number of the engine."""
    found = sorted(run.of("inside_engine/serve.py"), key=lambda process: process.create_time())
    return [child.pid for process in found for child in process.children()[:1]]


@pytest.mark.timeout(900)
def test_a_run_whose_engines_are_killed(project: Project, engine: str, by_hf: list[dict[str, Any]],
                                        tmp_path: Path) -> None:
    run_dir, graded = tmp_path / "run", tmp_path / "graded"
    log = run_dir / "logs" / "controller.log"
    flags = train(project, run_dir, *engine_flags(engine), "--rollout.num_engines", "2", "--rollout.batch_size", "4",
                  "--weight_sync.bucket_bytes", "600")  # so many buckets that a push takes seconds
    with command(flags, tmp_path / "output", GRADED=str(graded), E2E_REWARD_SECONDS="0.05") as run:
        run.until(lambda: len(rows(run_dir)) >= 1)
        first, second = serving(run)
        pushed = log.read_text().count("weight version ")
        run.until(lambda: log.read_text().count("weight version ") > pushed)  # a rollout begins
        os.kill(first, signal.SIGSTOP)  # so that it certainly has a request when it is killed
        time.sleep(2)
        os.kill(first, signal.SIGKILL)
        pushes = log.read_text().count(" begins on ")
        run.until(lambda: log.read_text().count(" begins on ") > pushes)
        time.sleep(0.3)
        os.kill(second, signal.SIGKILL)
        assert run.wait(700) == 0, run.said
        run.assert_nothing_left(20)
    said = log.read_text()
    assert "engine-0" in said and "engine-1" in said and said.count("is started again (1 of at most 3 times)") == 2
    assert "request failed on engine-" in said, "one of them was killed while generating"
    assert "push of weight version" in run.said and "failed (try 1 of 4), again: engine-" in run.said
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(row["logprob_max_diff"] <= 1e-5 for row in metrics), "whoever samples has the actor's weights"
    counts = Counter(graded.read_text().splitlines())
    assert len(counts) == STEPS * PROMPTS and set(counts.values()) == {GROUP}, "exactly group_size samples each"
    n = STEPS * PROMPTS * GROUP
    assert abs(mean_reward(metrics) - mean_reward(by_hf)) < 4 * math.sqrt(2 * 0.25 / n), "rewards as with transformers"


@pytest.mark.timeout(500)
def test_parity(project: Project, engine: str, tmp_path: Path) -> None:
    flags = ["parity", "--out", str(tmp_path / "out"), "--model.hf", str(project.model), "--prompts", "3", "--samples",
             "2", "--rollout.max_response_tokens", "10", "--rollout.temperature", "0.6", "--data.max_prompt_tokens",
             "64", "--batch.max_tokens_per_micro_batch", "128", "--parallel.world_size", "2", "--parallel.pp", "2",
             *engine_flags(engine)]
    done = luspo(flags, tmp_path / "scratch")
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["good"] and len(report["checks"]) == 2
    assert all(check["numerics"]["max"] <= 1e-5 and check["numerics"]["tokens"] > 6 for check in report["checks"])
    assert f"actor / {engine} engine: max" in done.stdout
