"""ASGI middleware: every path of an engine needs the run's token, the weight and pause calls above all.

vLLM's own --api-key guards only /v1. Without LUSPO_ENGINE_TOKEN in the environment everything is let through.
"""

from __future__ import annotations

import hmac
import os
from typing import Any


class TokenGuard:
    def __init__(self, app: Any) -> None:
        self._app = app
        token = os.environ.get("LUSPO_ENGINE_TOKEN", "")
        self._expected = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not self._expected:
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        body = b'{"error": "wrong or missing token"}'
        await send({"type": "http.response.start", "status": 401,
                    "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
        return None
