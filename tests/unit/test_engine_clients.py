"""What the clients of vLLM and SGLang ask of a server, and in which order: pushes (field case 14), sleep and wake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import EngineStart
from luspo_megatron.rollout.sglang_client import SglangClient
from luspo_megatron.rollout.vllm_client import VLLM_KIND, VllmClient

CLIENTS = {"vllm": VllmClient, "sglang": SglangClient}
PUSH = {
    "vllm": ["/pause?mode=wait&clear_cache=false", "/start_weight_update", "/update_weights", "/finish_weight_update",
             "/reset_prefix_cache?reset_running_requests=true", "/update_weight_version", "/weight_info", "/resume"],
    "sglang": ["/pause_generation", "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update",
               "/flush_cache", "/model_info", "/continue_generation"],
}
LOAD = {"vllm": "/update_weights", "sglang": "/update_weights_from_distributed"}


class Recorder:
    """Answers every path as the engine would when all is well. ``version``: what it says it holds."""

    def __init__(self, version: str = "3", fail: str = "") -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.version, self.fail = version, fail

    async def answer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        text = await request.text()
        self.bodies[request.path] = await request.json() if text else None
        if request.path == self.fail:
            return web.json_response({"error": "no"}, status=500)
        return web.json_response({"success": True, "message": "", "weight_version": self.version})

    def run(self, engine: str, body: Callable[[Any], Awaitable[None]], **options: Any) -> None:
        async def work() -> None:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            client = CLIENTS[engine](f"http://127.0.0.1:{runner.addresses[0][1]}", "", 10.0, **options)
            try:
                await body(client)
            finally:
                await client.close()
                await runner.cleanup()

        asyncio.run(work())


@pytest.mark.parametrize("engine", CLIENTS)
def test_a_push_pauses_loads_flushes_and_resumes_in_that_order(engine: str) -> None:
    recorder = Recorder()
    recorder.run(engine, lambda client: client.update_weights({"version": 3, "buckets": []}))
    assert recorder.calls == PUSH[engine]


@pytest.mark.parametrize("engine", CLIENTS)
def test_another_version_than_the_push_is_an_error_and_nothing_is_sampled_from_it(engine: str) -> None:
    recorder = Recorder(version="2")

    async def body(client: Any) -> None:
        with pytest.raises(RunError, match="holds weight version 2 after push 3"):
            await client.update_weights({"version": 3, "buckets": []})
        with pytest.raises(RunError, match="incomplete after a failed push"):
            await client.generate(None)

    recorder.run(engine, body)
    assert not {"/resume", "/continue_generation"} & set(recorder.calls)


@pytest.mark.parametrize("engine", CLIENTS)
def test_a_load_that_fails_is_not_resumed(engine: str) -> None:
    recorder = Recorder(fail=LOAD[engine])

    async def body(client: Any) -> None:
        with pytest.raises(RunError):
            await client.update_weights({"version": 3, "buckets": []})

    recorder.run(engine, body)
    assert not {"/resume", "/continue_generation", "/flush_cache"} & set(recorder.calls)


def test_updates_in_flight_freeze_what_runs() -> None:
    recorder = Recorder()
    recorder.run("vllm", lambda client: client.update_weights({"version": 3, "buckets": []}), in_flight=True)
    assert recorder.calls[0] == "/pause?mode=keep&clear_cache=false"
    recorder = Recorder()
    recorder.run("sglang", lambda client: client.update_weights({"version": 3, "buckets": []}), in_flight=True)
    assert recorder.bodies["/pause_generation"] == {"mode": "retract"}


@pytest.mark.parametrize(("engine", "calls"), [
    ("vllm", ["/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
    ("sglang", ["/release_memory_occupation", "/resume_memory_occupation", "/resume_memory_occupation"]),
])
def test_memory_is_given_up_and_taken_back_in_two_parts(engine: str, calls: list[str]) -> None:
    recorder = Recorder()
    tags: list[Any] = []

    async def body(client: Any) -> None:
        await client.sleep()
        for what in ("weights", "kv_cache"):
            await client.wake(what)
            tags.append(recorder.bodies.get("/resume_memory_occupation"))

    recorder.run(engine, body)
    assert recorder.calls == calls
    if engine == "sglang":
        assert recorder.bodies["/release_memory_occupation"] == {"tags": ["weights", "kv_cache"]}
        assert tags == [{"tags": ["weights"]}, {"tags": ["kv_cache"]}]


@pytest.mark.parametrize("config", [{"head_dim": 24}, {"hidden_size": 96, "num_attention_heads": 4}])
def test_vllm_on_a_cpu_refuses_heads_it_does_not_know(tmp_path: Path, config: dict[str, int]) -> None:
    def command(on_cpu: bool) -> list[str]:
        return VLLM_KIND.command(EngineStart(str(tmp_path), "float32", 1, 8, "url", on_cpu=on_cpu))

    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="attention heads of 24 channels, and vLLM on a CPU knows 32, 64"):
        command(on_cpu=True)
    assert "--enforce-eager" not in command(on_cpu=False)
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 32}))
    assert "--enforce-eager" in command(on_cpu=True)
