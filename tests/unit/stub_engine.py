"""An engine double as a process: the embedded engine's HTTP face without a model, to be killed and delayed.

A response is a function of (prompt, seed, version) only. Environment: STUB_DELAY seconds per request; STUB_FAIL names
a file: while it exists, /generate answers 500; STUB_START_FAIL: end at once with this exit code; STUB_SLOW_START:
seconds before it listens; STUB_DIE_AFTER: seconds that it serves.

Run as `python -m stub_engine engines ...` this is `luspo engines`, to which --nnodes N in rollout.engine_args means
something: the double then serves once the other parts have come to its rendezvous. A part stays whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

from aiohttp import web

from luspo_megatron import engine_layout
from luspo_megatron.rollout.engine import EngineKind, EngineStart
from luspo_megatron.rollout.hf_client import HfClient
from luspo_megatron.rollout.processes import be_owned


def respond(prompt: list[int], seed: int, version: int) -> dict[str, object]:
    length = 1 + seed % 3
    ids = [2 + (seed // 7 + i) % 10 for i in range(length)] + [1]
    return {"response_ids": ids, "logprobs": [-0.5] * len(ids), "finish_reason": "stop",
            "weight_version_start": version, "weight_version_end": version}


async def serve(port_file: Path) -> None:
    version, token = 0, os.environ["LUSPO_ENGINE_TOKEN"]
    events: list[str] = []

    @web.middleware
    async def guard(request, handler):  # type: ignore[no-untyped-def]
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"error": "token"}, status=401)
        return await handler(request)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"name": "stub", "weight_version": version, "max_batch": 4, "max_requests": 1,
                                  "status": "ready", "events": events})

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(float(os.environ.get("STUB_DELAY", "0")))
        if Path(os.environ.get("STUB_FAIL", "/nonexistent")).exists():
            return web.json_response({"error": "told to fail"}, status=500)
        print(f"served {len(body['seeds'])}", flush=True)
        return web.json_response(
            [respond(p, s, version) for p, s in zip(body["prompts"], body["seeds"], strict=True)])

    async def plain(request: web.Request) -> web.Response:
        nonlocal version
        events.append(request.path)
        if request.path == "/resume":
            version = (await request.json()).get("version", version)
        return web.json_response({})

    app = web.Application(middlewares=[guard])
    app.router.add_get("/health", health)
    app.router.add_post("/generate", generate)
    app.router.add_post("/{any}", plain)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    partial = port_file.with_suffix(".part")
    partial.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}")
    partial.replace(port_file)
    if "STUB_DIE_AFTER" in os.environ:
        await asyncio.sleep(float(os.environ["STUB_DIE_AFTER"]))
        print("the stub was told to die", flush=True)
        os._exit(1)
    await asyncio.Event().wait()


async def meet(rendezvous: str, others: int) -> None:
    """Until so many other parts have come."""
    host, _, port = rendezvous.rpartition(":")
    come = asyncio.Semaphore(0)
    server = await asyncio.start_server(lambda *_: come.release(), host, int(port))
    for _ in range(others):
        await come.acquire()
    server.close()


async def join(rendezvous: str) -> None:
    host, _, port = rendezvous.rpartition(":")
    while True:
        with contextlib.suppress(OSError):
            await asyncio.open_connection(host, int(port))
            break
        await asyncio.sleep(0.05)
    print(f"joined at {rendezvous}", flush=True)
    await asyncio.Event().wait()


def command(start: EngineStart) -> list[str]:
    nodes = engine_layout.engine_layout("stub", start.args).nodes
    return [sys.executable, __file__, start.port_file, start.rendezvous, str(start.part), str(nodes)]


KIND = EngineKind("stub", HfClient, command)

if __name__ == "__main__" and sys.argv[1] == "engines":
    from luspo_megatron.cli import main

    for engine in ("stub", "stub_engine:KIND"):
        engine_layout.SPELLINGS[engine] = engine_layout.SPELLINGS["sglang"]
        engine_layout.SWITCHES[engine] = ()
    sys.exit(main(sys.argv[1:]))

if __name__ == "__main__":
    be_owned()
    if os.environ.get("STUB_START_FAIL"):
        print("the stub was told not to start", flush=True)
        sys.exit(int(os.environ["STUB_START_FAIL"]))
    time.sleep(float(os.environ.get("STUB_SLOW_START", "0")))
    address, part, number = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if part:
        asyncio.run(join(address))
    if address:
        asyncio.run(meet(address, number - 1))
    asyncio.run(serve(Path(sys.argv[1])))
