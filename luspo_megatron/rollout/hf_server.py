"""The embedded engine: a small HTTP server around a Hugging Face model, for tiny models and the CPU.

It exists so that a run on a laptop goes through the same fleet, versions and weight transport as one on a cluster.
One request is one batch; the model runs in a single worker thread, so a weight update never meets a running batch.
A push is: POST /pause (waits for what runs; later requests wait), /update_weights (load and check), /flush, /resume
with the new version. Left out: streaming, continuous batching, in-flight updates, models above a stated size.

Run: python -m luspo_megatron.rollout.hf_server --model DIR --port-file FILE
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout import hf_generate
from luspo_megatron.rollout.engine import GenerateRequest
from luspo_megatron.rollout.hf_model import MAX_PARAMETERS, build_model
from luspo_megatron.rollout.hf_weights import Loader, check_manifest, checksums, on_disk_locations
from luspo_megatron.rollout.processes import be_owned
from luspo_megatron.weights.manifest import EngineConnection, Manifest
from luspo_megatron.weights.transports.base import Receiver
from luspo_megatron.weights.transports.meeting import open_receiver

log = logging.getLogger("hf_server")


class HfEngine:
    """The model, its weight version, and the order of calls. All model work runs in one thread."""

    def __init__(self, model: Any, *, name: str = "hf", max_batch: int = 256, verify: bool = True) -> None:
        self.model, self.name, self.max_batch, self.verify = model, name, max_batch, verify
        self.version = 0
        self.complete = True  # False once a push broke off half way: the weights belong to no version
        self.events: deque[str] = deque(maxlen=200)  # pause, load, flush, version, resume
        self.served: int = 0
        self._locations = on_disk_locations(model)  # empty while it sleeps
        self._shapes: dict[Any, torch.Size] = {}
        self._loaded: int | None = None  # version of a loaded push that is not in force yet
        self._flushed = False
        self._receiver: Receiver | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def health(self) -> dict[str, Any]:
        status = "incomplete" if not self.complete else "ready" if self._resumed.is_set() else "paused"
        return {"name": self.name, "weight_version": self.version, "max_batch": self.max_batch, "max_requests": 1,
                "status": status, "served": self.served, "events": list(self.events)}

    async def generate(self, request: GenerateRequest) -> list[dict[str, Any]]:
        self._check(request)
        if not self.complete:
            raise RunError("the engine's weights are incomplete after a failed push; push them whole again")
        while not self._resumed.is_set():
            await self._resumed.wait()
        self._running += 1
        self._idle.clear()
        version = self.version
        try:
            responses = await self._in_thread(self._generate, request)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        self.served += len(responses)
        return [{**vars(response), "weight_version_start": version, "weight_version_end": self.version}
                for response in responses]

    def _generate(self, request: GenerateRequest) -> list[hf_generate.Response]:
        return hf_generate.generate(
            self.model, request.prompts, request.seeds, temperature=request.temperature, top_p=request.top_p,
            max_response_tokens=request.max_response_tokens, stop_token_ids=request.stop_token_ids)

    def _check(self, request: GenerateRequest) -> None:
        """What would fail deep inside, or be silently wrong."""
        config = self.model.config
        limit, vocabulary = getattr(config, "max_position_embeddings", None), config.vocab_size
        problems = []
        if not request.prompts or len(request.prompts) != len(request.seeds):
            problems.append(f"{len(request.prompts)} prompts and {len(request.seeds)} seeds")
        if any(not prompt for prompt in request.prompts):
            problems.append("an empty prompt")
        elif any(not 0 <= token < vocabulary for prompt in request.prompts for token in prompt):
            problems.append(f"a prompt token outside the vocabulary of {vocabulary}: the tokenizer is another model's")
        if request.temperature < 0 or not 0 < request.top_p <= 1 or request.max_response_tokens < 1:
            problems.append("needed: temperature >= 0, 0 < top_p <= 1, max_response_tokens >= 1")
        longest = max(map(len, request.prompts), default=0)
        if limit and longest + request.max_response_tokens > limit:
            problems.append(f"a prompt of {longest} tokens and max_response_tokens {request.max_response_tokens} "
                            f"exceed the model's {limit} positions; lower rollout.max_response_tokens or "
                            "data.max_prompt_tokens")
        if problems:
            raise UserError(f"generate request refused: {'; '.join(problems)}")

    async def pause(self) -> None:
        self._resumed.clear()
        await self._idle.wait()
        self.events.append("pause")

    async def connect_weights(self, connection: EngineConnection) -> None:
        self._disconnect()
        self._receiver = await self._in_thread(open_receiver, connection, self.model.device)

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def update_weights(self, manifest: Manifest) -> None:
        """Receive and load a whole push. On any error the groups are left, so that no source waits for us."""
        try:
            if self._resumed.is_set() or self._running:
                raise RunError("update_weights came while the engine is serving; pause it first")
            fresh = self.version == 0 and manifest.version >= 1  # a (re)started engine joins at any version
            again = manifest.version == self.version  # another engine failed in this push
            if manifest.version != self.version + 1 and not fresh and not again:
                raise RunError(f"weight push {manifest.version} does not follow the engine's version {self.version}")
            if self._receiver is None:
                raise RunError("update_weights came before connect_weights")
            check_manifest(manifest, self._locations)
            self._flushed = False
            await self._in_thread(self._load, manifest, self._receiver)
        except BaseException:
            self._disconnect()
            raise
        self._loaded, self.complete = manifest.version, True
        self.events.append("load")

    def _load(self, manifest: Manifest, receiver: Receiver) -> None:
        loader = Loader(self._locations, self.verify)
        receiver.begin(manifest)
        for bucket in manifest.buckets:
            buffer = receiver.receive(bucket)
            self.complete = False
            loader.load(bucket, buffer)
        if self.verify:
            loader.verify()

    async def weights_checksums(self) -> dict[str, str]:
        """xxh3_64 of every tensor as it lies in the model, by on-disk name."""
        return await self._in_thread(checksums, self._locations)  # type: ignore[no-any-return]

    def flush(self) -> None:
        """This engine keeps no cache between requests; the call is part of the order and recorded."""
        self._flushed = True
        self.events.append("flush")

    def resume(self, version: int | None) -> None:
        """Serve again; with ``version``, under the push just loaded."""
        if not self.complete:
            raise RunError("the engine's weights are incomplete after a failed push; push them whole again")
        if version != self._loaded:
            raise RunError(f"resume with version {version}, but the loaded push is {self._loaded}")
        if version is not None:
            if not self._flushed:
                raise RunError(f"resume with version {version} before the caches were flushed")
            self.version, self._loaded = version, None
            self.events.append(f"version {version}")
        self.events.append("resume")
        self._resumed.set()

    async def sleep(self) -> None:
        """The weights are dropped, when nothing is running any more; a push has to follow `wake`."""
        await self.pause()
        self.complete = False
        self._locations = {}
        for parameter in self.model.parameters():
            self._shapes.setdefault(parameter, parameter.shape)
            parameter.data = parameter.new_empty(0)
        self.events.append("sleep")

    async def wake(self, what: str) -> None:
        """"weights": memory for them; "kv_cache": this engine keeps none between requests."""
        if what == "weights" and not self._locations:
            for parameter, shape in self._shapes.items():
                parameter.data = parameter.new_empty(shape)
            self._locations = on_disk_locations(self.model)
        self.events.append(f"wake {what}")

    def close(self) -> None:
        self._disconnect()
        self._thread.shutdown(wait=False, cancel_futures=True)


def make_app(engine: HfEngine, token: str) -> web.Application:
    """The HTTP face. Every answer is JSON; errors are {"error": text} with 400 (request), 409 (refused), 500."""

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
                    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return web.json_response({"error": "wrong or missing token"}, status=401)
        try:
            return await handler(request)
        except UserError as error:
            return web.json_response({"error": str(error)}, status=400)
        except RunError as error:
            log.error("%s: %s", request.path, error)
            return web.json_response({"error": str(error)}, status=409)
        except web.HTTPException:
            raise
        except Exception as error:
            log.exception("%s failed", request.path)
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    async def health(_: web.Request) -> web.Response:
        return web.json_response(engine.health())

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(await engine.generate(GenerateRequest.from_dict(await request.json())))

    async def weights_checksums(_: web.Request) -> web.Response:
        return web.json_response(await engine.weights_checksums())

    async def pause(_: web.Request) -> web.Response:
        await engine.pause()
        return web.json_response({})

    async def connect_weights(request: web.Request) -> web.Response:
        await engine.connect_weights(EngineConnection.from_dict(await request.json()))
        return web.json_response({})

    async def update_weights(request: web.Request) -> web.Response:
        await engine.update_weights(Manifest.from_dict(await request.json()))
        return web.json_response({})

    async def flush(_: web.Request) -> web.Response:
        engine.flush()
        return web.json_response({})

    async def resume(request: web.Request) -> web.Response:
        engine.resume((await request.json()).get("version"))
        return web.json_response({})

    async def sleep(_: web.Request) -> web.Response:
        await engine.sleep()
        return web.json_response({})

    async def wake(request: web.Request) -> web.Response:
        await engine.wake((await request.json())["what"])
        return web.json_response({})

    app = web.Application(middlewares=[guard], client_max_size=2**30)
    app.router.add_get("/health", health)
    app.router.add_get("/weights_checksums", weights_checksums)
    for handler in (generate, pause, connect_weights, update_weights, flush, resume, sleep, wake):
        app.router.add_post(f"/{handler.__name__}", handler)
    return app


async def serve(engine: HfEngine, host: str, port: int, port_file: Path, token: str, owned: bool) -> None:
    """Listen until SIGTERM (or the owner's end); the URL appears in ``port_file`` in one piece."""
    runner = web.AppRunner(make_app(engine, token), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port, reuse_address=True).start()
    url = f"http://{host}:{runner.addresses[0][1]}"
    partial = port_file.with_suffix(".tmp")
    partial.write_text(url)
    partial.replace(port_file)
    log.info("listening on %s", url)
    stop = asyncio.Event()
    for number in () if owned else (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    engine.close()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(runner.cleanup(), 2.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Embedded Hugging Face rollout engine (tiny models).")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--port-file", type=Path, required=True, help="where the URL is written once it listens")
    parser.add_argument("--name", default="hf")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-batch", type=int, default=256, help="sequences per request, told to clients")
    parser.add_argument("--max-parameters", type=int, default=MAX_PARAMETERS, help="larger models are refused")
    parser.add_argument("--dummy-weights", action="store_true", help="random weights instead of the folder's")
    parser.add_argument("--no-verify", action="store_true", help="do not read loaded weights back")
    parser.add_argument("--token", default="", help="default: the environment variable LUSPO_ENGINE_TOKEN")
    parser.add_argument("--owned", action="store_true", help="end when standard input closes, not on signals")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.owned:
        be_owned()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(args.threads)

    async def run() -> None:
        engine = HfEngine(model, name=args.name, max_batch=args.max_batch, verify=not args.no_verify)
        token = args.token or os.environ.get("LUSPO_ENGINE_TOKEN", "")
        await serve(engine, args.host, args.port, args.port_file, token, args.owned)

    try:
        model = build_model(args.model, args.dtype, threads=args.threads, device=args.device,
                            dummy_weights=args.dummy_weights, max_parameters=args.max_parameters)
        asyncio.run(run())
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    os._exit(0)  # a model thread may still sit in a batch or a broadcast; the owner wants us gone


if __name__ == "__main__":
    sys.exit(main())
