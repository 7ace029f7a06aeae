"""Client and start command of SGLang servers. Imports neither torch nor sglang.

Generation goes token ids in, token ids out (/generate), a whole request at once with a seed for each sequence. A push
follows SGLang's own lifecycle; inside_engine/sglang_plugin.py is its other half. SGLang has no pause that waits, so the
client waits for its own requests first, unless updates are in flight.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

import numpy as np

from luspo_megatron.engine_layout import engine_layout
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import (
    EngineInfo,
    EngineKind,
    EngineStart,
    GenerateRequest,
    Generation,
)
from luspo_megatron.rollout.http_engine import HttpEngine, serve_command, spans_of, version_of
from luspo_megatron.types import RoutedExperts
from luspo_megatron.weights.manifest import EngineConnection

MAX_REQUESTS = 64  # the engine queues by itself; this only keeps the routing fair


class SglangClient(HttpEngine):
    """``in_flight``: a push retracts running sequences, which go on under the new weights, instead of waiting.
    ``routing``: (layers, topk) of the model, when the routed experts are wanted (the answer does not say)."""

    def __init__(self, url: str, token: str, timeout: float, in_flight: bool = False,
                 routing: tuple[int, int] | None = None) -> None:
        super().__init__(url, token, timeout)
        self._in_flight, self._routing = in_flight, routing
        self._version, self._broken = 0, ""
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()  # closed while a push that waits is under way
        self._open.set()

    async def health(self) -> EngineInfo:
        await self._call("GET", "/health", timeout=25.0)
        info = await self._call("GET", "/model_info", timeout=10.0)
        server = await self._call("GET", "/server_info", timeout=10.0)
        self._version = version_of(info["weight_version"])
        layout = engine_layout("sglang", [f"--tp-size={server['tp_size']}", f"--pp-size={server['pp_size']}",
                                          f"--dp-size={server['dp_size']}",
                                          *(["--enable-dp-attention"] if server.get("enable_dp_attention") else [])])
        return EngineInfo("sglang", self._version, 0, MAX_REQUESTS, "incomplete" if self._broken else "ready",
                          layout.workers)

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        if self._broken:
            raise RunError(f"engine {self.url}: its weights are incomplete after a failed push ({self._broken})")
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            answers = await self._call("POST", "/generate", self._body(request), self._timeout)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        return [self._generation(answer, len(prompt)) for answer, prompt in zip(answers, request.prompts, strict=True)]

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        common = {"temperature": request.temperature, "top_p": request.top_p,
                  "max_new_tokens": request.max_response_tokens, "stop_token_ids": request.stop_token_ids,
                  "skip_special_tokens": False}
        # A seed of SGLang is a 32-bit hash's input; more bits are cut off there, so they are folded in here.
        sampling = [{**common, "sampling_seed": (seed ^ seed >> 31) & 0x7FFFFFFF} for seed in request.seeds]
        return {"input_ids": request.prompts, "sampling_params": sampling, "return_logprob": True,
                "logprob_start_len": -1, "return_routed_experts": self._routing is not None}

    def _generation(self, answer: dict[str, Any], prompt_length: int) -> Generation:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            raise RunError(f"engine {self.url}: a request was aborted: {meta['finish_reason'].get('message', '')}")
        pairs = meta["output_token_logprobs"]  # the sampled ids and their log-probs from one place: they cannot differ
        first, last = spans_of(meta.get("weight_versions"), version_of(meta.get("weight_version")))
        routed = None
        if self._routing is not None:
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
            routed = RoutedExperts.from_array(flat.reshape(prompt_length + len(pairs) - 1, *self._routing))
        return Generation([pair[1] for pair in pairs], [pair[0] for pair in pairs], reason, first, last, routed)

    async def connect_weights(self, connection: EngineConnection) -> None:
        body = {"master_address": connection.host, "master_port": connection.port, "rank_offset": connection.rank,
                "world_size": connection.world_size, "group_name": "luspo",
                "backend": "luspo:" + json.dumps(connection.to_dict())}
        self._check(await self._call("POST", "/init_weights_update_group", body, connection.timeout + 60.0))

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        self._open.clear()
        try:
            if not self._in_flight:
                await asyncio.wait_for(self._idle.wait(), self._timeout)
            await self._update(manifest)
        finally:
            self._open.set()

    async def _update(self, manifest: dict[str, Any]) -> None:
        version = int(manifest["version"])
        await self._call("POST", "/pause_generation", {"mode": "retract"}, 60.0)
        self._broken = f"version {version}"
        self._check(await self._call("POST", "/begin_weight_update", {}))
        try:
            self._check(await self._call("POST", "/update_weights_from_distributed", {
                "names": [json.dumps(manifest)], "dtypes": ["manifest"], "shapes": [[0]], "group_name": "luspo",
                "load_format": "luspo", "flush_cache": False, "weight_version": str(version)}))
        except (UserError, RunError):
            with contextlib.suppress(UserError, RunError):  # close the session, so that the next push can open one
                await self._call("POST", "/end_weight_update", {}, 60.0)
            raise
        self._check(await self._call("POST", "/end_weight_update", {}))
        await self._call("POST", "/flush_cache", timeout=60.0)
        info = await self._call("GET", "/model_info", timeout=60.0)
        if info["weight_version"] != str(version):
            raise RunError(f"engine {self.url}: holds weight version {info['weight_version']} after push {version}")
        self._version, self._broken = version, ""
        await self._call("POST", "/continue_generation", {}, 60.0)

    async def sleep(self) -> None:
        """Weights and KV cache leave the GPU's memory; a push has to follow ``wake("weights")``."""
        await self._call("POST", "/release_memory_occupation", {"tags": ["weights", "kv_cache"]}, self._timeout)

    async def wake(self, what: str) -> None:
        """``what``: "weights" or "kv_cache"."""
        await self._call("POST", "/resume_memory_occupation", {"tags": [what]}, self._timeout)

    def _check(self, answer: Any) -> None:
        if not answer["success"]:
            raise RunError(f"engine {self.url}: {answer['message']}")


def _command(start: EngineStart) -> list[str]:
    flags = ["--model-path", start.model, "--served-model-name", "actor", "--dtype", start.dtype,
             # Without it SGLang ignores the seeds of requests.
             "--enable-deterministic-inference", "--sampling-backend", "pytorch",
             "--skip-server-warmup", "--log-level", "warning", "--skip-tokenizer-init"]
    if start.sleeps:
        flags += ["--enable-memory-saver"]
    if start.host:
        flags += ["--host", start.host]
    if start.max_length:
        flags += ["--context-length", str(start.max_length)]
    if start.routed_experts:
        flags += ["--enable-return-routed-experts"]
    if start.on_cpu:
        flags += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
                  "--mem-fraction-static", "0.8", "--max-total-tokens", "16384", "--max-running-requests", "64",
                  "--grammar-backend", "none", "--disable-cuda-graph"]
    parts = ["--node-rank", str(start.part), "--dist-init-addr", start.rendezvous] if start.rendezvous else []
    return serve_command("sglang", start, flags, parts)


SGLANG_KIND = EngineKind("sglang", SglangClient, _command)
