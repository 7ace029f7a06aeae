"""The order in which trainer and colocated engines hand each other the memory of their GPUs.

One phase: the trainer has just trained and holds everything, the engines sleep. Optimizer off, engine weights awake,
sync, actor off, KV cache awake, generate, sleep, everything of the trainer back. The weights of both exist at the same
time only during the sync; the KV cache never together with the actor's parameters. The order is data, so that a test
can compare what was called with it; both sides are Protocols, so that it needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from luspo_megatron.config import LaunchConfig, RolloutConfig

SLEEPERS = ("vllm", "sglang")
ORDER = ("offload_optimizer", "wake weights", "push", "offload_actor", "wake kv_cache", "generate", "sleep", "onload")


class TrainerMemory(Protocol):
    """Every rank's own memory (actor/offload.py)."""

    def offload_optimizer(self) -> None: ...

    def offload_actor(self) -> None: ...

    def onload(self) -> None: ...


class EngineMemory(Protocol):
    """The engines' memory. Every rank calls it; it returns on all ranks when all engines have done it."""

    def wake(self, what: str) -> None:
        """``what``: "weights" or "kv_cache" (vLLM: /wake_up?tags=; SGLang: /resume_memory_occupation)."""

    def sleep(self) -> None:
        """Weights and KV cache are dropped (vLLM: /sleep; SGLang: /release_memory_occupation)."""


def hands_over(rollout: RolloutConfig, launch: LaunchConfig, on_cpu: bool) -> bool:
    """What rollout.hand_over means here."""
    if rollout.hand_over != "auto":
        return rollout.hand_over == "on"
    return not on_cpu and rollout.engine in SLEEPERS and not rollout.urls and not launch.engine_nodes


def begin(trainer: TrainerMemory, engines: EngineMemory, push: Callable[[], None]) -> None:
    """From training, with sleeping engines, to engines that can generate."""
    trainer.offload_optimizer()
    engines.wake("weights")
    push()
    trainer.offload_actor()
    engines.wake("kv_cache")


def rollout_phase[T](trainer: TrainerMemory, engines: EngineMemory, push: Callable[[], None],
                     generate: Callable[[], T]) -> T:
    """One weight push and one rollout between two trainings, in the order above; what `generate` gives.

    When the push or the rollout fails, the trainer's memory comes back (so that a checkpoint can be written) and the
    error goes on.
    """
    try:
        begin(trainer, engines, push)
        result = generate()
        engines.sleep()
    except BaseException:
        trainer.onload()
        raise
    trainer.onload()
    return result


Push = Callable[[Callable[[], None] | None], None]
"""Pushes the current weights; the argument is what does so again in mid-rollout, for engines that were started again
(None: another push does)."""


class AlwaysReady:
    """Engines with memory of their own: every new version goes to them at once."""

    def __init__(self, push: Push) -> None:
        self._push = push

    def start(self) -> None:
        self._push(None)

    def trained(self) -> None:
        self._push(None)

    def generating[T](self, draw: Callable[[], T]) -> T:
        """`draw`, while the engines serve the current weights."""
        return draw()


class TakeTurns:
    """Engines that share the trainer's memory: weights are pushed when they wake, once for each phase of generating.

    At the start the trainer's memory is handed over already, and the engines are awake without a push.
    """

    def __init__(self, trainer: TrainerMemory, engines: EngineMemory, push: Push) -> None:
        self._trainer, self._engines, self._push = trainer, engines, push

    def start(self) -> None:
        self._engines.sleep()
        self._trainer.onload()

    def trained(self) -> None:
        """They sleep."""

    def generating[T](self, draw: Callable[[], T]) -> T:
        return rollout_phase(self._trainer, self._engines, self._push_here, draw)

    def _push_here(self) -> None:
        self._push(self._begin_again)

    def _begin_again(self) -> None:
        """In mid-rollout, when all engines were started again and none can serve."""
        self._engines.sleep()
        self._trainer.onload()
        begin(self._trainer, self._engines, self._push_here)
