"""Client of the embedded Hugging Face engine (rollout/hf_server.py). Imports no torch."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import (
    EngineInfo,
    EngineKind,
    EngineStart,
    GenerateRequest,
    Generation,
)
from luspo_megatron.rollout.http_engine import HttpEngine
from luspo_megatron.weights.manifest import EngineConnection


class HfClient(HttpEngine):
    """One embedded engine at ``url``."""

    async def health(self) -> EngineInfo:
        data = await self._call("GET", "/health", timeout=10.0)
        return EngineInfo(data["name"], data["weight_version"], data["max_batch"], data["max_requests"],
                          data["status"])

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        answers = await self._call("POST", "/generate", request.to_dict(), self._timeout)
        return [Generation(**answer) for answer in answers]

    async def connect_weights(self, connection: EngineConnection) -> None:
        await self._call("POST", "/connect_weights", connection.to_dict(), connection.timeout + 60.0)

    async def weights_checksums(self) -> dict[str, str]:
        """xxh3_64 of every tensor that the engine holds, by on-disk name."""
        checksums: dict[str, str] = await self._call("GET", "/weights_checksums", timeout=self._timeout)
        return checksums

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

    async def sleep(self) -> None:
        await self._call("POST", "/sleep", {}, self._timeout)

    async def wake(self, what: str) -> None:
        await self._call("POST", "/wake", {"what": what}, self._timeout)


def _command(start: EngineStart) -> list[str]:
    return [sys.executable, "-m", "luspo_megatron.rollout.hf_server", "--owned", "--model", start.model,
            "--dtype", start.dtype, "--threads", str(start.threads), "--max-batch", str(start.max_batch),
            "--port-file", start.port_file, *([] if start.verify else ["--no-verify"]),
            *(["--host", start.host] if start.host else [])]


HF_KIND = EngineKind("hf", HfClient, _command)
