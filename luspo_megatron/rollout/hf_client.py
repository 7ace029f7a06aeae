"""Client of the embedded Hugging Face engine (rollout/hf_server.py). Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import aiohttp

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import (
    EngineFailure,
    EngineInfo,
    EngineKind,
    EngineStart,
    GenerateRequest,
    Generation,
)
from luspo_megatron.weights.manifest import EngineConnection


class HfClient:
    """One engine at ``url``. ``timeout``: seconds of one generate request; pushes end by their own time-outs."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def _call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        try:
            async with self._session.request(method, self.url + path, json=body,
                                             timeout=aiohttp.ClientTimeout(total=timeout)) as answer:
                data = await answer.json()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            detail = f"no answer in {timeout:g} s" if isinstance(error, asyncio.TimeoutError) and timeout else error
            raise EngineFailure(f"engine {self.url}{path}: {type(error).__name__}: {detail}") from error
        if answer.status == 200:
            return data
        text = f"engine {self.url}{path}: {data.get('error', answer.reason)}"
        raise {400: UserError, 401: RunError, 409: RunError}.get(answer.status, EngineFailure)(text)

    async def health(self) -> EngineInfo:
        data = await self._call("GET", "/health", timeout=10.0)
        return EngineInfo(data["name"], data["weight_version"], data["max_batch"], data["max_requests"],
                          data["status"])

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        answers = await self._call("POST", "/generate", request.to_dict(), self._timeout)
        return [Generation(**answer) for answer in answers]

    async def connect_weights(self, connection: EngineConnection) -> None:
        await self._call("POST", "/connect_weights", connection.to_dict(), connection.timeout + 60.0)

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        await self._call("POST", "/pause", {}, self._timeout)
        try:
            await self._call("POST", "/update_weights", manifest)
        except (UserError, RunError):
            with contextlib.suppress(UserError, RunError):  # back to the old weights, where they are still whole
                await self._call("POST", "/resume", {}, 10.0)
            raise
        await self._call("POST", "/flush", {}, 60.0)
        await self._call("POST", "/resume", {"version": manifest["version"]}, 60.0)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _command(start: EngineStart) -> list[str]:
    return [sys.executable, "-m", "luspo_megatron.rollout.hf_server", "--owned", "--model", start.model,
            "--dtype", start.dtype, "--threads", str(start.threads), "--max-batch", str(start.max_batch),
            "--port-file", start.port_file, *([] if start.verify else ["--no-verify"])]


HF_KIND = EngineKind("hf", HfClient, _command)
