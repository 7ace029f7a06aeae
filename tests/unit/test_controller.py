"""The controller and its client as two processes: batches, evaluation, seeds, state, weights, and every way to end.

Engine doubles (stub_engine.py) where the engine does not matter; the embedded engine once, for a whole step with a
push.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import check_logprobs, disk_tensors, make_push, tiny_model, write_prompts, write_tokenizer

from luspo_megatron.config import (
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from luspo_megatron.config_io import load_config, save_config
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.client import ControllerClient
from luspo_megatron.rollout.controller import Controller
from luspo_megatron.rollout.engine import GenerateRequest
from luspo_megatron.rollout.sampling import SamplingPlan, pass_rates, sample_seed
from luspo_megatron.rollout.wire import group_from_dict
from luspo_megatron.types import Prompt

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("controller")
    model = tiny_model("moe", 1)
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    write_prompts(folder / "train.jsonl", 40)
    write_prompts(folder / "eval.jsonl", 12)
    return folder


@pytest.fixture(scope="module", autouse=True)
def stub_on_path() -> Iterator[None]:
    """Child processes find stub_engine.py and rollout_grading.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        yield


def write_config(files: Path, run_dir: Path, **rollout: Any) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = {"engine": "stub_engine:KIND", "prompts_per_step": 6, "group_size": 4, "batch_size": 10,
                "max_response_tokens": 8, "start_timeout": 60.0, **rollout}
    config = Config(
        run=RunConfig(dir=str(run_dir), seed=5),
        model=ModelConfig(hf=str(files / "model")),
        data=DataConfig(prompts=str(files / "train.jsonl"), eval_prompts=str(files / "eval.jsonl")),
        rollout=RolloutConfig(**settings),
        reward=RewardConfig(terms=("rollout_grading:length_is_even:1.0",), workers=1),
    )
    path = run_dir / "resolved.yaml"
    save_config(config, path)
    return path


def start(files: Path, run_dir: Path, **rollout: Any) -> ControllerClient:
    return ControllerClient.start(write_config(files, run_dir, **rollout), run_dir)


def in_process(files: Path, run_dir: Path, body: Callable[[Controller], Awaitable[None]], **rollout: Any) -> None:
    """The controller itself, without the process around it."""

    async def run() -> None:
        config = load_config(Config, ["--config", str(write_config(files, run_dir, **rollout))])
        controller = await Controller.build(config, run_dir)
        try:
            await body(controller)
        finally:
            await controller.close()

    asyncio.run(run())


def tokens(groups: Any) -> list[Any]:
    return [(g.group_id, g.prompt.prompt_id, [(s.response_ids, s.reward) for s in g.samples]) for g in groups]


def test_batches_are_graded_numbered_and_the_same_after_a_resume(files: Path, tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    path = write_config(files, tmp_path / "a", num_engines=2)
    with ControllerClient.start(path, tmp_path / "a", on_progress=lambda *event: progress.append(event)) as client:
        batches = [client.next_batch(0), client.next_batch(1)]
        state = client.state()
        batches.append(client.next_batch(2))
        assert client.statistics["rollout_prompts"] == 6 and client.statistics["retries"] == 0
    assert [g.group_id for batch in batches for g in batch] == list(range(18))
    assert len({g.prompt.prompt_id for batch in batches for g in batch}) == 18
    for group in batches[0]:
        assert [s.sample_index for s in group.samples] == [0, 1, 2, 3]
        for sample in group.samples:
            assert sample.prompt_ids == list(group.prompt.prompt_ids) and sample.group_id == group.group_id
            even = len(sample.response_ids) % 2 == 0
            assert (sample.reward, sample.correct) == (float(even), even)
            assert len(sample.rollout_logprobs) == len(sample.response_ids)
            assert sample.response_text and "<eos>" not in sample.response_text
    assert progress[0] == ("rollout", 0, 24) and progress[-1] == ("rollout", 24, 24)
    assert group_seeds_differ(batches)

    async def resumed(controller: Controller) -> None:
        await controller.load_state(state)
        answer = await controller.next_batch(2)
        assert tokens(map(group_from_dict, answer["groups"])) == tokens(batches[2])

    in_process(files, tmp_path / "b", resumed)  # one engine instead of two: who serves changes nothing


def group_seeds_differ(batches: list[Any]) -> bool:
    responses = [tuple(s.response_ids) for batch in batches for g in batch for s in g.samples]
    return len(set(responses)) > 5


def test_resumed_run_must_push_before_it_samples(files: Path, tmp_path: Path) -> None:
    async def body(controller: Controller) -> None:
        await controller.load_state({**await controller.state(), "weight_version": 4})
        with pytest.raises(RunError, match="resumed at weight version 4.*push the weights"):
            await controller.next_batch(3)
        status = await controller.weights_status()
        assert status == {"version": 0, "num_workers": 1, "needs_connect": True, "generation": -1}
        await controller.connect_weights("127.0.0.1", 1, 0, [0], 2, 5.0)
        await controller.update_weights({"version": 4, "buckets": []})
        groups = (await controller.next_batch(3))["groups"]
        assert {s["weight_version_start"] for g in groups for s in g["samples"]} == {4}
        assert (await controller.weights_status())["needs_connect"] is False
        controller.fleet.weight_version = controller.fleet.slots[0].weight_version = 5  # an engine that lags behind
        with pytest.raises(RunError, match="versions 4 to 4, expected 5"):
            await controller.next_batch(4)

    in_process(files, tmp_path, body)


def test_dynamic_sampling_replaces_groups_without_signal(files: Path, tmp_path: Path) -> None:
    async def enough(controller: Controller) -> None:
        answer = await controller.next_batch(0)
        groups, statistics = list(map(group_from_dict, answer["groups"])), answer["statistics"]
        assert len(groups) == 6 and statistics["dynamic_filled"] == 0
        assert all(len({s.reward for s in group.samples}) == 2 for group in groups)
        assert statistics["dynamic_dropped"] == statistics["rollout_prompts"] - 6 > 0
        assert 1 <= statistics["dynamic_rounds"] <= 8
        # Out of rounds: a step keeps its size, with groups whose advantages are 0.
        controller.config = dataclasses.replace(
            controller.config, rollout=dataclasses.replace(controller.config.rollout, max_extra_rounds=0))
        answer = await controller.next_batch(0)
        assert len(answer["groups"]) == 6 and answer["statistics"]["dynamic_filled"] > 0

    in_process(files, tmp_path, enough, dynamic_sampling=True, group_size=2, max_extra_rounds=8)


def test_evaluation_counts_and_leaves_the_run_alone(files: Path, tmp_path: Path) -> None:
    async def body(controller: Controller) -> None:
        before = await controller.state()
        result = await controller.evaluate(samples=4, temperature=1.0, greedy=True, size=0, seed=9)
        assert await controller.evaluate(samples=4, temperature=1.0, greedy=True, size=0, seed=9) == result
        small = await controller.evaluate(samples=2, temperature=1.0, greedy=False, size=5, seed=9)
        assert await controller.state() == before
        assert result["n"] == 12 and small["n"] == 5 and "greedy" not in small
        assert 0 < result["pass_at_1"] < 1 and result["pass_at_1"] <= result["pass_at_k"]
        assert 2 <= result["mean_length"] <= 4 and result["truncated"] == 0

    in_process(files, tmp_path, body)


def test_the_control_plane_imports_neither_torch_nor_megatron() -> None:
    code = ("import sys, luspo_megatron.rollout.controller_server, luspo_megatron.rollout.client; "
            "luspo_megatron.rollout.engine.load_engine_kind('hf'); "
            "sys.exit(' '.join({'torch', 'megatron', 'transformers'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_pass_rates_by_hand() -> None:
    rates = pass_rates([[True, True], [True, False], [False, False], [True, False]])
    assert rates["pass_at_1"] == 0.5 and rates["pass_at_k"] == 0.75
    assert rates["pass_at_1_se"] == pytest.approx(math.sqrt((0.25 + 0.25) / 3) / 2)  # shares 1, .5, 0, .5
    assert pass_rates([[True]]) == {"pass_at_1": 1.0, "pass_at_1_se": 0.0, "pass_at_k": 1.0}


def test_seeds_are_distinct_pure_and_chunks_cover_every_sample_once() -> None:
    keys = [(r, q, s, p, i) for r in (0, 1) for q in ("rollout", "eval") for s in (0, 1) for p in range(10)
            for i in range(4)]
    seeds = [sample_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, "rollout", 1, 2, 3) == 6855106362326582050  # frozen: resumed runs depend on it
    prompts = [Prompt(str(i), (i + 2,), "", {}) for i in range(5)]
    plan = SamplingPlan("rollout", 0, 1, 3, 1.0, 1.0, 8, (1,), 4)
    chunks = list(plan.chunks(prompts, first_index=10))
    assert [len(request.seeds) for _, request in chunks] == [4, 4, 4, 3]
    assert [pair for members, _ in chunks for pair in members] == [(p, s) for p in range(5) for s in range(3)]
    for members, request in chunks:
        assert isinstance(request, GenerateRequest)
        assert request.seeds == [sample_seed(0, "rollout", 1, 10 + p, s) for p, s in members]
        assert request.prompts == [[p + 2] for p, _ in members]


def test_mistakes_come_back_as_user_errors(files: Path, tmp_path: Path) -> None:
    path = write_config(files, tmp_path)
    path.write_text(path.read_text().replace("train.jsonl", "nowhere.jsonl"))
    with pytest.raises(UserError, match="nowhere.jsonl"):
        ControllerClient.start(path, tmp_path)


def test_mistakes_in_engine_and_model_are_user_errors(files: Path, tmp_path: Path) -> None:
    async def nothing(_: Controller) -> None:
        raise AssertionError("the controller started")

    with pytest.raises(UserError, match="unknown"):
        in_process(files, tmp_path / "b", nothing, engine="nothing")
    other = tmp_path / "bare"
    (other / "model").mkdir(parents=True)
    jsons = ("config", "tokenizer", "tokenizer_config")
    for name in ("train.jsonl", "eval.jsonl", *(f"model/{name}.json" for name in jsons)):
        (other / name).write_bytes((files / name).read_bytes())
    with pytest.raises(UserError, match=r"(?s)engine-0 could not start.*no \*\.safetensors"):
        in_process(other, tmp_path / "c", nothing, engine="hf")


def test_a_controller_that_dies_is_noticed_at_once_and_takes_its_engines_along(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_DELAY", "30")
    client = start(files, tmp_path)
    pid = client._process.pid
    children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert children
    waiting = client.call_async("next_batch", rollout_id=0)
    time.sleep(0.3)
    os.kill(pid, signal.SIGTERM)  # a signal to the whole job does not end it
    time.sleep(0.3)
    assert not waiting.done()
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"(?s)controller is gone.*SIGKILL.*engine-0 serves at"):
        waiting.result(10)
    assert time.monotonic() - began < 3
    with pytest.raises(RunError, match="controller is gone"):
        client.next_batch(1)
    client.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text()
              for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_controller_that_cannot_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)could not start.*exit code 1.*broken on purpose"):
        ControllerClient.start("none", tmp_path, command=[sys.executable, "-c", "exit('broken on purpose')"])


def test_a_whole_step_with_the_embedded_engine_and_a_push(files: Path, tmp_path: Path) -> None:
    """Sampled under version 0, pushed, sampled under version 1: log-probs are those of the weights each time."""
    from luspo_megatron.weights.transports.process_group import ProcessGroupSender, host_store

    models = [tiny_model("moe", 1), tiny_model("moe", 2)]
    with start(files, tmp_path, engine="hf", prompts_per_step=3, num_engines=2) as client:
        check(client.next_batch(0), models[0], 0)
        store, host, port = host_store()
        world_size = client.weights_status().num_workers + 1
        joined = client.connect_weights(host, port, 0, (0,), world_size=world_size, timeout=20.0)
        sender = ProcessGroupSender(host, port, 0, 0, world_size, 20.0)
        joined.result(20)
        manifest, buffers = make_push(1, disk_tensors(models[1], tmp_path / "b"), 10_000)
        update = client.update_weights_async(manifest.to_dict())
        for bucket, buffer in zip(manifest.buckets, buffers, strict=True):
            sender.send(bucket, buffer).wait()
        update.result(20)
        check(client.next_batch(1), models[1], 1)
        sender.close()
        del store


def check(groups: Any, model: Any, version: int) -> None:
    assert len(groups) == 3
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.weight_version_start == sample.weight_version_end == version
        check_logprobs(sample.rollout_logprobs, model, sample.prompt_ids, sample.response_ids)
