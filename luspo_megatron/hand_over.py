"""The order in which trainer and colocated engines hand each other the memory of their GPUs.

One phase: the trainer has just trained and holds everything, the engines sleep. Optimizer off, engine weights awake,
sync, actor off, KV cache awake, generate, sleep, everything of the trainer back. The weights of both exist at the same
time only during the sync; the KV cache never together with the actor's parameters. The order is data, so that a test
can compare what was called with it; both sides are Protocols, so that it needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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


def rollout_phase[T](trainer: TrainerMemory, engines: EngineMemory, push: Callable[[], None],
                     generate: Callable[[], T]) -> T:
    """One weight push and one rollout between two trainings, in the order above; what `generate` gives.

    When the push or the rollout fails, the trainer's memory comes back (so that a checkpoint can be written) and the
    error goes on.
    """
    try:
        trainer.offload_optimizer()
        engines.wake("weights")
        push()
        trainer.offload_actor()
        engines.wake("kv_cache")
        result = generate()
        engines.sleep()
    except BaseException:
        trainer.onload()
        raise
    trainer.onload()
    return result
