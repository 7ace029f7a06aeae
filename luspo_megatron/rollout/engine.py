"""The rollout engine as the rest of the program sees it: one Protocol of five methods, and its data.

An engine is always a server process behind HTTP. A kind of engine (``EngineKind``) says how to start one and how to
talk to it; ``rollout.engine`` in the config names a kind. Imports no torch. Left out here: who starts engines, routes
requests and restarts the dead (rollout/fleet.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.plugin import is_plugin_name, load_plugin
from luspo_megatron.types import FinishReason, RoutedExperts
from luspo_megatron.weights.manifest import EngineConnection


class EngineFailure(RunError):
    """A request failed for a reason that another engine, or the same one later, may not have. It may be retried."""


@dataclass(frozen=True)
class EngineInfo:
    """``max_batch``: sequences an engine works on at a time (0: it decides); ``max_requests``: requests worth sending
    it at a time; ``num_workers``: processes that hold a part of its weights and join the weight groups."""

    name: str
    weight_version: int
    max_batch: int
    max_requests: int = 1
    status: str = "ready"
    num_workers: int = 1


@dataclass(frozen=True)
class GenerateRequest:
    """One batch: sequence ``i`` continues ``prompts[i]``, drawn with ``seeds[i]``. temperature 0 is greedy."""

    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    top_p: float
    max_response_tokens: int
    stop_token_ids: list[int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GenerateRequest:
        return cls(**data)


@dataclass(frozen=True)
class Generation:
    """One response. The stop token is part of ``response_ids``; ``logprobs`` are natural logs of the full softmax
    of logits / temperature (of the raw logits at temperature 0), one per response token, whatever top_p is."""

    response_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version_start: int
    weight_version_end: int
    routed_experts: RoutedExperts | None = None


class RolloutEngine(Protocol):
    """A client of one engine server. Methods raise EngineFailure (worth a retry), UserError (the request itself is
    wrong) or RunError (the engine refuses for good)."""

    async def health(self) -> EngineInfo: ...

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """Answers in the order of the request."""

    async def connect_weights(self, connection: EngineConnection) -> None:
        """Join the weight groups of a run; returns when all sources have connected too. ``connection.rank`` is the rank
        of the engine's first worker, the others follow."""

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        """Take one whole push, in this order: pause, load, flush the caches, set the version, resume. The cache goes
        after the load, because what is computed before belongs to the old weights."""

    async def sleep(self) -> None:
        """Weights and KV cache are given back; nothing is generated before `wake` ("weights", then, after a push,
        "kv_cache")."""

    async def wake(self, what: str) -> None:
        """``what``: "weights" or "kv_cache"."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class EngineStart:
    """What a kind's start command is built from. ``verify``: read loaded weights back after a push; ``args``: flags of
    the engine itself, which win over ours; ``python``: the interpreter of the engine's environment; ``max_length``:
    tokens of the longest prompt and response together, 0: the engine's own limit; ``host``: address to listen on
    and to be reached at, empty: loopback; ``sleeps``: it must be able to give its memory back; ``rendezvous``: of an
    engine over several nodes, "host:port" where its parts meet; ``part``: which of them this is, 0 is the server."""

    model: str
    dtype: str
    threads: int
    max_batch: int
    port_file: str
    verify: bool = True
    args: tuple[str, ...] = ()
    python: str = field(default_factory=lambda: sys.executable)
    max_length: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    routed_experts: bool = False
    on_cpu: bool = True
    host: str = ""
    sleeps: bool = False
    rendezvous: str = ""
    part: int = 0


@dataclass(frozen=True)
class EngineKind:
    """``connect(url, token, request_timeout, **options)`` makes a client; ``command(start)`` is the argument list of a
    server. The options are keywords and only given when set: ``in_flight`` (True) and ``routing`` ((layers, topk)).

    The server writes its URL to ``start.port_file`` when it listens, takes the token from the environment variable
    LUSPO_ENGINE_TOKEN, and ends when its standard input closes.
    """

    name: str
    connect: Callable[..., RolloutEngine]
    command: Callable[[EngineStart], list[str]]


def load_engine_kind(name: str) -> EngineKind:
    """``hf``, ``vllm``, ``sglang``, or ``module:attribute`` of an EngineKind. Raises UserError naming the mend."""
    if name == "hf":
        from luspo_megatron.rollout.hf_client import HF_KIND

        return HF_KIND
    if name == "vllm":
        from luspo_megatron.rollout.vllm_client import VLLM_KIND

        return VLLM_KIND
    if name == "sglang":
        from luspo_megatron.rollout.sglang_client import SGLANG_KIND

        return SGLANG_KIND
    if not is_plugin_name(name):
        raise UserError(f"rollout.engine={name!r} is unknown; known: hf, vllm, sglang, or module:attribute")
    kind = load_plugin(name, "rollout.engine")
    if not isinstance(kind, EngineKind):
        raise UserError(f"rollout.engine={name!r} is a {type(kind).__name__}, not an EngineKind "
                        "(luspo_megatron.rollout.engine)")
    return kind
