"""What the clients of engine servers share: one HTTP session, the token, the kinds of failure, and the command line.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import EngineFailure, EngineStart


class HttpEngine:
    """A server at ``url``. ``timeout``: seconds of one generate request; pushes end by their own time-outs."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def _call(self, method: str, path: str, body: Any = None, timeout: float | None = None,
                    params: Mapping[str, str] | None = None) -> Any:
        """The JSON answer (None for an empty one). Raises EngineFailure, UserError or RunError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.request(method, self.url + path, json=body, params=params,
                                             timeout=aiohttp.ClientTimeout(total=timeout)) as answer:
                text = await answer.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            detail = f"no answer in {timeout:g} s" if isinstance(error, asyncio.TimeoutError) and timeout else error
            raise EngineFailure(f"engine {self.url}{path}: {type(error).__name__}: {detail}") from error
        data = _parse(text)
        if answer.status == 200:
            return data
        message = f"engine {self.url}{path}: {_reason(data) or answer.reason}"
        if answer.status == 400:
            raise UserError(message)
        # What the server will refuse again is not worth a retry; what it is too busy for is.
        raise (RunError if 400 < answer.status < 500 and answer.status not in (408, 429) else EngineFailure)(message)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _parse(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _reason(data: Any) -> str:
    """The message of an error answer, whichever way the server wraps it."""
    while isinstance(data, dict):
        data = data.get("error") or data.get("message") or data.get("detail") or json.dumps(data)
    return str(data or "").strip()


def version_of(label: Any) -> int:
    """Weight versions are integers; an engine that has had no push calls its weights something else (version 0)."""
    try:
        return int(label)
    except (TypeError, ValueError):
        return 0


def spans_of(spans: Any, current: int) -> tuple[int, int]:
    """(first, last) weight version of a response's ``weight_versions``; ``current`` where the server gives none."""
    versions = [version_of(span["version"] if isinstance(span, dict) else span[0]) for span in spans or []]
    return (versions[0], versions[-1]) if versions else (current, current)


def serve_command(engine: str, start: EngineStart, flags: Sequence[str], last: Sequence[str]) -> list[str]:
    """inside_engine/serve.py with the engine's flags: ours, then the person's, which win, then those that nobody may
    overrule."""
    serve = Path(__file__).parent / "inside_engine/serve.py"
    return [start.python, str(serve), engine, "--owned", "--port-file", start.port_file,
            *(["--part"] if start.part else []), "--", *flags, *start.args, *last]
