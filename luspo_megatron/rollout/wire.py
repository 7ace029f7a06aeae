"""Messages between trainer rank 0 and the controller: length-prefixed JSON over a Unix socket. No torch.

A request is {id, method, params}; an answer {id, result} or {id, error: {kind, text}}; while a request runs there may
be any number of {id, progress: {phase, done, total}}. Floats survive JSON exactly (shortest round-trip form).
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.types import Group, Prompt, RoutedExperts, Sample

_LENGTH = struct.Struct(">Q")
MAX_BYTES = 4 * 2**30
ERRORS: Mapping[str, type[Exception]] = {"UserError": UserError, "RunError": RunError}


def _plain(value: Any) -> Any:
    """What a data set's row may hold and JSON does not know."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


def encode(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, default=_plain).encode()
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message, or None when the other end is gone."""
    try:
        length = _checked(await reader.readexactly(_LENGTH.size))
        body: dict[str, Any] = json.loads(await reader.readexactly(length))
        return body
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_message(connection: socket.socket) -> dict[str, Any] | None:
    """The same for a blocking socket."""
    head = _receive(connection, _LENGTH.size)
    body = None if head is None else _receive(connection, _checked(head))
    return None if body is None else json.loads(body)


def _checked(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_BYTES:
        raise ConnectionError(f"a message of {length} bytes: the other end is not a controller or its client")
    return int(length)


def _receive(connection: socket.socket, length: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < length:
        try:
            part = connection.recv(min(1 << 20, length - len(parts)))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def group_to_dict(group: Group) -> dict[str, Any]:
    return asdict(group)


def _sample(data: Mapping[str, Any]) -> Sample:
    routed = data.get("routed_experts")
    if routed is None:
        return Sample(**data)
    return Sample(**{**data, "routed_experts": RoutedExperts(tuple(routed["shape"]), routed["dtype"], routed["data"])})


def group_from_dict(data: Mapping[str, Any]) -> Group:
    prompt = data["prompt"]
    return Group(
        group_id=data["group_id"],
        prompt=Prompt(prompt["prompt_id"], tuple(prompt["prompt_ids"]), prompt["text"], prompt["row"]),
        samples=[_sample(sample) for sample in data["samples"]],
    )
