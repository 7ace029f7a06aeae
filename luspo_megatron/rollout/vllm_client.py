"""Client and start command of vLLM servers. Imports neither torch nor vllm.

Generation goes token ids in, token ids out (/inference/v1/generate): one request per sequence, since a request has one
seed; vLLM batches them and shares the prompts of a group through its prefix cache. A push follows vLLM's own lifecycle;
inside_engine/vllm_plugin.py is its other half.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

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
PLUGIN = "luspo_megatron.rollout.inside_engine"
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM 0.32, v1/attention/backends/cpu_attn.py. With another one it starts, and ends at the first request."""


class VllmClient(HttpEngine):
    """``in_flight``: a push freezes running sequences, which go on under the new weights, instead of waiting."""

    def __init__(self, url: str, token: str, timeout: float, in_flight: bool = False,
                 routing: tuple[int, int] | None = None) -> None:
        super().__init__(url, token, timeout)
        self._in_flight = in_flight
        self._version = 0
        self._broken = ""  # why the weights belong to no version

    async def health(self) -> EngineInfo:
        await self._call("GET", "/health", timeout=10.0)
        info = await self._call("GET", "/weight_info", timeout=10.0)
        world = await self._call("GET", "/get_world_size", timeout=10.0)
        self._version = version_of(info["weight_version"])
        return EngineInfo("vllm", self._version, 0, MAX_REQUESTS, "incomplete" if self._broken else "ready",
                          int(world["world_size"]))

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        if self._broken:
            raise RunError(f"engine {self.url}: its weights are incomplete after a failed push ({self._broken})")
        return list(await asyncio.gather(*(self._one(request, prompt, seed) for prompt, seed in
                                           zip(request.prompts, request.seeds, strict=True))))

    async def _one(self, request: GenerateRequest, prompt: list[int], seed: int) -> Generation:
        parameters = {"temperature": request.temperature, "top_p": request.top_p, "top_k": 0, "seed": seed,
                      "max_tokens": request.max_response_tokens, "stop_token_ids": request.stop_token_ids,
                      "ignore_eos": True, "logprobs": 0, "detokenize": False, "skip_special_tokens": False}
        answer = await self._call("POST", "/inference/v1/generate",
                                  {"token_ids": prompt, "sampling_params": parameters}, self._timeout)
        choice = answer["choices"][0]
        first, last = spans_of(choice.get("weight_versions"), self._version)
        return Generation(choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]],
                          choice["finish_reason"], first, last, _routed(choice.get("routed_experts")))

    async def connect_weights(self, connection: EngineConnection) -> None:
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": {"connection": connection.to_dict()}},
                         connection.timeout + 60.0)

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        version = int(manifest["version"])
        await self._call("POST", "/pause", timeout=self._timeout, params={
            "mode": "keep" if self._in_flight else "wait", "clear_cache": "false"})
        self._broken = f"version {version}"
        await self._call("POST", "/start_weight_update")
        await self._call("POST", "/update_weights", {"update_info": {"manifest": manifest}})
        await self._call("POST", "/finish_weight_update")
        flushed = await self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not flushed["success"]:
            raise RunError(f"engine {self.url}: the prefix cache could not be flushed after weight push {version}")
        await self._call("POST", "/update_weight_version", {"new_version": str(version)})
        info = await self._call("GET", "/weight_info", timeout=60.0)
        if info["weight_version"] != str(version):
            raise RunError(f"engine {self.url}: holds weight version {info['weight_version']} after push {version}")
        self._version, self._broken = version, ""
        await self._call("POST", "/resume", timeout=60.0)

    async def sleep(self) -> None:
        """Weights and KV cache leave the GPU's memory; a push has to follow ``wake("weights")``."""
        await self._call("POST", "/sleep", timeout=self._timeout, params={"level": "2"})

    async def wake(self, what: str) -> None:
        """``what``: "weights" or "kv_cache"."""
        await self._call("POST", "/wake_up", timeout=self._timeout, params={"tags": what})


def _routed(text: str | None) -> RoutedExperts | None:
    """vLLM sends an .npy file in base64, uint8 or int16 or int32 [tokens - 1, layers, topk]."""
    if text is None:
        return None
    return RoutedExperts.from_array(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))


def _check_head_dim(model: str) -> None:
    path = Path(model) / "config.json"
    if not path.exists():  # named when the weights are looked at
        return
    config = json.loads(path.read_text())
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    if head_dim and head_dim not in CPU_HEAD_DIMS:
        raise UserError(f"rollout.engine=vllm: {model} has attention heads of {head_dim} channels, and vLLM on a CPU "
                        f"knows {', '.join(map(str, CPU_HEAD_DIMS))} only; take rollout.engine sglang or hf, or a GPU")


def _command(start: EngineStart) -> list[str]:
    if start.top_p < 1 and start.temperature != 1:
        raise UserError(f"rollout.engine=vllm with top_p {start.top_p:g} and temperature {start.temperature:g}: vLLM "
                        "gives log-probs either before the temperature or after top_p, neither is the policy's; take "
                        "top_p 1 or temperature 1, or rollout.engine=sglang")
    flags = ["--model", start.model, "--served-model-name", "actor", "--dtype", start.dtype,
             "--seed", "0", "--logprobs-mode", "raw_logprobs" if start.top_p < 1 else "processed_logprobs",
             "--worker-extension-cls", f"{PLUGIN}.vllm_plugin.WorkerExtension",
             "--weight-transfer-config", '{"backend": "luspo"}', "--middleware", f"{PLUGIN}.token_guard.TokenGuard",
             "--enable-scale-out", "--generation-config", "vllm", "--disable-uvicorn-access-log", "--disable-log-stats"]
    if start.sleeps:
        flags += ["--enable-sleep-mode"]
    if start.host:
        flags += ["--host", start.host]
    if start.max_length:
        flags += ["--max-model-len", str(start.max_length)]
    if start.on_cpu:
        _check_head_dim(start.model)
        # With prompts in chunks vLLM 0.32 turns the generator of a seed back, which a CPU's cannot: the engine ends.
        flags += ["--enforce-eager", "--max-num-seqs", "64", "--no-enable-chunked-prefill"]
    parts = []
    if start.rendezvous:
        address, _, port = start.rendezvous.rpartition(":")
        parts = ["--node-rank", str(start.part), "--master-addr", address, "--master-port", port]
    return serve_command("vllm", start, flags, parts)


VLLM_KIND = EngineKind("vllm", VllmClient, _command)
