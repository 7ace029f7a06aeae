"""The embedded engine: sampling against the softmax and Hugging Face, weight pushes, order and refusals.

Not covered: GPUs, bfloat16 parity (routing flips), models of other families.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestServer
from rollout_helpers import EOS, VOCABULARY, check_logprobs, disk_tensors, make_push, tiny_model

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import GenerateRequest, Generation, load_engine_kind
from luspo_megatron.rollout.hf_client import HfClient
from luspo_megatron.rollout.hf_generate import generate, sample_rows, uniforms
from luspo_megatron.rollout.hf_model import build_model
from luspo_megatron.rollout.hf_server import HfEngine, make_app
from luspo_megatron.rollout.hf_weights import on_disk_locations
from luspo_megatron.weights.manifest import Bucket, EngineConnection, Manifest, TensorSlice
from luspo_megatron.weights.transports.process_group import ProcessGroupSender, host_store

torch.set_num_threads(1)

PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5], [12, 13], [3, 4, 5], [20, 21, 22, 23]]


def request(temperature: float = 0.8, top_p: float = 1.0, length: int = 12) -> GenerateRequest:
    return GenerateRequest(PROMPTS, list(range(100, 100 + len(PROMPTS))), temperature, top_p, length, [EOS])


# ---- sampling ------------------------------------------------------------------------------------------------


def test_frequencies_match_the_softmax_by_chi_square() -> None:
    """40,000 fixed draws of one row; chi-square with 15 degrees of freedom, 99.9% bound 37.70."""
    torch.manual_seed(0)
    logits, temperature, draws = torch.randn(16), 0.7, 40_000
    ids, logprobs = sample_rows(logits.expand(draws, 16), uniforms(range(draws), 1)[:, 0], temperature, 1.0)
    scaled = np.exp(logits.numpy().astype(np.float64) / temperature)
    expected = scaled / scaled.sum()
    observed = np.bincount(ids.numpy(), minlength=16)
    chi_square = float(((observed - draws * expected) ** 2 / (draws * expected)).sum())
    assert chi_square < 37.70
    np.testing.assert_allclose(logprobs.numpy(), np.log(expected[ids.numpy()]), atol=1e-6)


def test_top_p_keeps_the_smallest_sufficient_set_and_full_softmax_logprobs() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    uniform = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.float64)
    ids, logprobs = sample_rows(probabilities.log().expand(1000, 4), uniform, 1.0, 0.6)
    assert sorted(set(ids.tolist())) == [1, 3]  # .4 alone is less than .6, .4 + .3 is not
    assert (ids == 1).float().mean().item() == pytest.approx(4 / 7, abs=2e-3)
    assert set(logprobs.exp().numpy().round(6)) == {0.4, 0.3}
    ids, _ = sample_rows(probabilities.log().expand(1000, 4), uniform, 1.0, 0.05)
    assert set(ids.tolist()) == {1}


def test_edges_of_the_distribution_never_give_an_impossible_token() -> None:
    logits = torch.tensor([[-float("inf"), 0.0, 0.0, -float("inf")]]).expand(3, 4)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    for top_p in (1.0, 0.999):
        assert sample_rows(logits, uniform, 1.0, top_p)[0].tolist() == [1, 2, 2]
    assert sample_rows(torch.tensor([[1.0, 3.0, 2.0]]), uniform[:1], 0.0, 1.0)[0].tolist() == [1]


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_greedy_equals_hugging_face_generate(kind: str) -> None:
    model = tiny_model(kind, 3)
    answers = generate(model, PROMPTS, range(len(PROMPTS)), temperature=0.0, top_p=1.0, max_response_tokens=12,
                       stop_token_ids=[EOS])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                  do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=0)
        assert answer.response_ids == expected[0, len(prompt):].tolist()
        assert answer.finish_reason == ("stop" if answer.response_ids[-1] == EOS else "length")


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.3])
def test_logprobs_equal_a_fresh_forward_and_the_batch_changes_nothing(temperature: float) -> None:
    """Padding, cache and dropping finished rows leave each sequence's numbers alone."""
    model = tiny_model("moe", 4)
    options: dict[str, Any] = {"temperature": temperature, "top_p": 0.9, "max_response_tokens": 12,
                               "stop_token_ids": [EOS, 2, 3, 4]}
    seeds = list(range(len(PROMPTS)))
    together = generate(model, PROMPTS, seeds, **options)
    assert {answer.finish_reason for answer in together} == {"stop", "length"}
    for index, (prompt, answer) in enumerate(zip(PROMPTS, together, strict=True)):
        check_logprobs(answer.logprobs, model, prompt, answer.response_ids, temperature)
        (alone,) = generate(model, [prompt], [seeds[index]], **options)
        assert alone.response_ids == answer.response_ids
        assert not set(answer.response_ids[:-1]) & {EOS, 2, 3, 4}


# ---- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize("tied", [False, True])
def test_locations_are_what_save_pretrained_writes(kind: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(kind, 5, tied)
    written, locations = disk_tensors(model, tmp_path), on_disk_locations(model)
    assert locations.keys() == written.keys()
    assert ("lm_head.weight" in locations) is not tied
    for name, tensor in written.items():
        location = locations[name]
        flat = location.parameter.view(-1)[location.start : location.start + tensor.numel()]
        assert torch.equal(flat.view(location.shape), tensor), name


def with_engine(model: Any, body: Callable[[HfEngine, HfClient], Awaitable[None]]) -> None:
    """Run ``body`` against a real HTTP server around ``model`` in this process."""

    async def run() -> None:
        engine = HfEngine(model)
        server = TestServer(make_app(engine, "secret"))
        await server.start_server()
        client = HfClient(str(server.make_url("")), "secret", 30.0)
        try:
            await body(engine, client)
        finally:
            await client.close()
            await server.close()
            engine.close()

    asyncio.run(run())


class Trainer:
    """The sending side: one source, in threads, as a trainer rank would."""

    def __init__(self, client: HfClient) -> None:
        self.client, self.generation = client, 0

    async def connect(self) -> None:
        self.generation += 1
        self.store, host, port = host_store()  # a store that a push was broken off in is of no more use
        connection = EngineConnection(host, port, self.generation, (0,), 2, 1, 15.0)
        build = asyncio.to_thread(ProcessGroupSender, host, port, self.generation, 0, 2, 15.0)
        self.sender, _ = await asyncio.gather(build, self.client.connect_weights(connection))

    def send(self, manifest: Manifest, buffers: list[torch.Tensor]) -> None:
        for bucket, buffer in zip(manifest.buckets, buffers, strict=True):
            self.sender.send(bucket, buffer).wait()

    async def push(self, manifest: Manifest, buffers: list[torch.Tensor], announced: Manifest | None = None) -> None:
        await asyncio.gather(asyncio.to_thread(self.send, manifest, buffers),
                             self.client.update_weights((announced or manifest).to_dict()))


async def check_against(client: HfClient, reference: Any, version: int) -> list[Generation]:
    answers = await client.generate(request())
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert (answer.weight_version_start, answer.weight_version_end) == (version, version)
        check_logprobs(answer.logprobs, reference, prompt, answer.response_ids, 0.8)
    return answers


@pytest.mark.parametrize(("kind", "tied"), [("moe", False), ("moe", True), ("dense", False), ("dense", True)])
def test_push_a_b_a_in_order_with_split_tensors(kind: str, tied: bool, tmp_path: Path) -> None:
    """Log-probs follow the pushed weights and come back bitwise; pause < load < flush < version < resume."""
    a, b = tiny_model(kind, 1, tied), tiny_model(kind, 2, tied)
    tensors = {"a": disk_tensors(a, tmp_path / "a"), "b": disk_tensors(b, tmp_path / "b")}
    largest = max(t.numel() * t.element_size() for t in tensors["a"].values())

    async def body(engine: HfEngine, client: HfClient) -> None:
        trainer = Trainer(client)
        await trainer.connect()
        first = await check_against(client, a, 0)
        assert await client.generate(request()) == first  # bitwise: floats travel exactly
        bucket_bytes = largest // 3 + 1  # smaller than the largest tensor, and odd enough to cut others
        manifest, buffers = make_push(1, tensors["b"], bucket_bytes)
        assert any(not piece.whole for bucket in manifest.buckets for piece in bucket.slices)
        await trainer.push(manifest, buffers)
        second = await check_against(client, b, 1)
        gap = max(abs(x - y) for p, q in zip(first, second, strict=True)
                  for x, y in zip(p.logprobs, q.logprobs, strict=False))
        assert gap > 0.1
        await trainer.push(*make_push(2, tensors["a"], 10**6))
        third = await check_against(client, a, 2)
        assert [(g.response_ids, g.logprobs) for g in third] == [(g.response_ids, g.logprobs) for g in first]
        cycle = ["pause", "load", "flush", "version 1", "resume"]
        assert list(engine.events) == cycle + [event.replace("1", "2") for event in cycle]

    with_engine(tiny_model(kind, 1, tied), body)


def broken_pushes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[dict[str, torch.Tensor], int]]:
    """What the refusal says -> (tensors sent, step of the version)."""
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    dropped = {name: tensor for name, tensor in tensors.items() if name != expert}
    return {
        f"missing: {expert}": (dropped, 1),
        "not in the model: model.layers.1.mlp.experts.9.up_proj.weight": (
            {**dropped, "model.layers.1.mlp.experts.9.up_proj.weight": tensors[expert]}, 1),
        f"{expert}: sent with shape": ({**tensors, expert: tensors[expert].t().contiguous()}, 1),
        "push 7 does not follow the engine's version 5": (tensors, 2),
    }


def test_bad_pushes_are_refused_and_the_version_stays(tmp_path: Path) -> None:
    model = tiny_model("moe", 1)
    reference = tiny_model("moe", 1)
    tensors = disk_tensors(reference, tmp_path)

    async def body(engine: HfEngine, client: HfClient) -> None:
        trainer = Trainer(client)
        engine.version = 5  # an engine that has been pushed before, so that skipping is an error
        for message, (content, step) in broken_pushes(tensors).items():
            await trainer.connect()
            manifest, buffers = make_push(5 + step, content, 10**6)
            with pytest.raises(RunError, match=re.escape(message)):
                await client.update_weights(manifest.to_dict())
            with pytest.raises(RunError):  # the sender notices: the engine has left the group
                await asyncio.to_thread(trainer.send, manifest, buffers)
            assert (await client.health()).weight_version == 5
            await check_against(client, reference, 5)  # still whole, still serving
        with pytest.raises(RunError, match="before connect_weights"):
            await client.update_weights(make_push(6, tensors, 10**6)[0].to_dict())
        with pytest.raises(RunError, match="pause it first"):
            await engine.update_weights(make_push(6, tensors, 10**6)[0])

    with_engine(model, body)


def test_a_push_that_breaks_off_leaves_no_engine_serving_torn_weights(tmp_path: Path) -> None:
    model, other = tiny_model("moe", 1), tiny_model("moe", 2)
    tensors = disk_tensors(other, tmp_path)

    async def body(engine: HfEngine, client: HfClient) -> None:
        trainer = Trainer(client)
        await trainer.connect()
        manifest, buffers = make_push(1, tensors, 20_000)
        bad = Bucket(0, manifest.buckets[1].nbytes, (TensorSlice("x", "uint8", (1,), 0, 1, 0),) * len(
            manifest.buckets[1].slices))  # its checksums are those of other bytes
        sent = Manifest(1, (manifest.buckets[0], bad))
        results = await asyncio.gather(asyncio.to_thread(trainer.send, sent, buffers[:2]),
                                       client.update_weights(manifest.to_dict()), return_exceptions=True)
        assert "checksum differs" in str(results[1])
        info = await client.health()
        assert (info.weight_version, info.status) == (0, "incomplete")
        with pytest.raises(RunError, match="incomplete"):
            await client.generate(request())
        await trainer.connect()
        await trainer.push(manifest, buffers)  # a whole push mends it
        await check_against(client, other, 1)

    with_engine(model, body)


def test_asleep_it_holds_no_weights_and_wakes_for_a_push(tmp_path: Path) -> None:
    model, other = tiny_model("moe", 1), tiny_model("moe", 2)
    tensors = disk_tensors(other, tmp_path)

    def held() -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())

    async def body(engine: HfEngine, client: HfClient) -> None:
        trainer, full = Trainer(client), held()
        await trainer.connect()
        for version in (1, 2):
            await client.sleep()
            assert held() == 0 < full
            with pytest.raises(RunError, match="incomplete"):
                await client.generate(request())
            await client.wake("weights")
            assert held() == full
            await trainer.push(*make_push(version, tensors, 20_000))
            await client.wake("kv_cache")
            await check_against(client, other, version)

    with_engine(model, body)


def test_a_load_that_does_not_arrive_in_the_module_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that writes somewhere else (a copy) must not pass for an update."""
    tensors = disk_tensors(tiny_model("dense", 2), tmp_path)

    async def body(engine: HfEngine, client: HfClient) -> None:
        trainer = Trainer(client)
        await trainer.connect()
        real = torch.Tensor.copy_
        lost = engine._locations["model.norm.weight"].parameter.data_ptr()
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, *rest: self if self.data_ptr() == lost
                            else real(self, other, *rest))
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        with pytest.raises(RunError, match=r"do not hold what was sent: model\.norm\.weight"):
            await trainer.push(*make_push(1, tensors, 10**6))

    with_engine(tiny_model("dense", 1), body)


def test_pause_waits_for_what_runs_and_holds_back_what_comes() -> None:
    async def body(engine: HfEngine, client: HfClient) -> None:
        gate, real = threading.Event(), engine._generate

        def slow(asked: GenerateRequest) -> Any:
            assert gate.wait(10)
            return real(asked)

        engine._generate = slow  # type: ignore[method-assign]
        running = asyncio.create_task(client.generate(request()))
        await asyncio.sleep(0.1)
        pause = asyncio.create_task(engine.pause())
        await asyncio.sleep(0.05)
        later = asyncio.create_task(client.generate(request()))
        await asyncio.sleep(0.05)
        assert not pause.done() and not running.done()
        gate.set()
        await pause
        await running
        await asyncio.sleep(0.1)
        assert not later.done() and (await client.health()).status == "paused"
        engine.resume(None)
        assert await later == await running

    with_engine(tiny_model("dense", 1), body)


# ---- requests and start --------------------------------------------------------------------------------------


def test_wrong_requests_and_tokens_are_refused_with_the_reason() -> None:
    async def body(engine: HfEngine, client: HfClient) -> None:
        cases = {
            "outside the vocabulary": GenerateRequest([[VOCABULARY]], [0], 1.0, 1.0, 4, [EOS]),
            "rollout.max_response_tokens": GenerateRequest([[3] * 10], [0], 1.0, 1.0, 60, [EOS]),
            "empty prompt": GenerateRequest([[]], [0], 1.0, 1.0, 4, [EOS]),
            "1 prompts and 2 seeds": GenerateRequest([[3]], [0, 1], 1.0, 1.0, 4, [EOS]),
            "top_p <= 1": GenerateRequest([[3]], [0], 1.0, 1.5, 4, [EOS]),
        }
        for message, bad in cases.items():
            with pytest.raises(UserError, match=message):
                await client.generate(bad)
        stranger = HfClient(client.url, "wrong", 5.0)
        with pytest.raises(RunError, match="token"):
            await stranger.health()
        await stranger.close()

    with_engine(tiny_model("dense", 1), body)


def test_models_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        build_model(str(tmp_path), "float32")
    model = tiny_model("moe", 1)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="safetensors"):
        build_model(str(tmp_path), "float32")
    assert build_model(str(tmp_path), "float32", dummy_weights=True).config.num_experts == 4
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="takes up to 1,000"):
        build_model(str(tmp_path), "float32", max_parameters=1000)
    loaded = build_model(str(tmp_path), "float32", threads=2)
    assert loaded.config._experts_implementation == "grouped_mm"
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    from safetensors.torch import load_file, save_file
    tensors = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.0.self_attn.q_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=gone):
        build_model(str(tmp_path), "float32")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(UserError, match="cannot be loaded"):
        build_model(str(tmp_path), "float32")


def test_engine_kinds() -> None:
    assert load_engine_kind("hf").name == "hf"
    assert load_engine_kind("luspo_megatron.rollout.hf_client:HF_KIND").name == "hf"
    assert load_engine_kind("vllm").name == "vllm" and load_engine_kind("sglang").name == "sglang"
    for name, word in (("nothing", "unknown"), ("json:dumps", "not an EngineKind"), ("json:nothing", "no attribute")):
        with pytest.raises(UserError, match=word):
            load_engine_kind(name)
