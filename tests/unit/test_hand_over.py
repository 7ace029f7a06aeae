"""The order of the colocated memory hand-over, by recorded calls."""

from __future__ import annotations

from typing import Any

import pytest

from luspo_megatron.config import LaunchConfig, RolloutConfig
from luspo_megatron.hand_over import ORDER, AlwaysReady, TakeTurns, hands_over, rollout_phase


class Recorder:
    """Trainer and engines at once, with what each holds."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.held = {"optimizer", "actor"}
        self.most: list[set[str]] = []

    def _call(self, name: str, *, frees: tuple[str, ...] = (), takes: tuple[str, ...] = ()) -> None:
        self.calls.append(name)
        if name == self.fail:
            raise RuntimeError(name)
        self.held = (self.held - set(frees)) | set(takes)
        self.most.append(set(self.held))

    def offload_optimizer(self) -> None:
        self._call("offload_optimizer", frees=("optimizer",))

    def offload_actor(self) -> None:
        self._call("offload_actor", frees=("actor",))

    def onload(self) -> None:
        self._call("onload", takes=("optimizer", "actor"))

    def wake(self, what: str) -> None:
        self._call(f"wake {what}", takes=(what,))

    def sleep(self) -> None:
        self._call("sleep", frees=("weights", "kv_cache"))

    def push(self) -> None:
        self._call("push")

    def generate(self) -> str:
        self._call("generate")
        return "samples"


def test_order_and_what_exists_at_the_same_time() -> None:
    both = Recorder()
    assert rollout_phase(both, both, both.push, both.generate) == "samples"
    assert tuple(both.calls) == ORDER
    # DESIGN.md: offload optimizer, wake weights, sync, offload actor, wake KV cache, generate, sleep, onload
    assert both.calls == ["offload_optimizer", "wake weights", "push", "offload_actor", "wake kv_cache", "generate",
                          "sleep", "onload"]
    for held in both.most:
        assert not {"optimizer", "weights"} <= held and not {"actor", "kv_cache"} <= held
    assert both.held == {"optimizer", "actor"}


def test_turns() -> None:
    """Engines start awake and with weights; after a restart of all of them everything is handed over once more."""
    both, again = Recorder(), []

    def push(begin_again: Any) -> None:
        both.push()
        again.append(begin_again)

    turns = TakeTurns(both, both, push)
    turns.start()
    assert both.calls == ["sleep", "onload"]
    turns.trained()
    assert turns.generating(both.generate) == "samples"
    assert tuple(both.calls[2:]) == ORDER
    del both.calls[:]

    def generate() -> str:
        again[-1]()
        return both.generate()

    assert turns.generating(generate) == "samples"
    start = list(ORDER[: ORDER.index("generate")])
    assert both.calls == [*start, "sleep", "onload", *start, "generate", "sleep", "onload"]


def test_without_turns_every_version_is_pushed_once() -> None:
    both = Recorder()
    ready = AlwaysReady(lambda again: both.push())
    ready.start()
    ready.trained()
    assert ready.generating(both.generate) == "samples" and both.calls == ["push", "push", "generate"]


@pytest.mark.parametrize(("rollout", "launch", "on_cpu", "expected"), [
    ({"engine": "vllm"}, {}, False, True),
    ({"engine": "sglang"}, {"engine_nodes": 1}, False, False),
    ({"engine": "vllm"}, {}, True, False),
    ({"engine": "vllm", "urls": ("http://a:1",)}, {}, False, False),
    ({"engine": "hf"}, {}, False, False),
    ({"engine": "vllm", "hand_over": "off"}, {}, False, False),
    ({"engine": "hf", "hand_over": "on"}, {}, True, True),
])
def test_when(rollout: Any, launch: Any, on_cpu: bool, expected: bool) -> None:
    assert hands_over(RolloutConfig(**rollout), LaunchConfig(**launch), on_cpu) is expected


@pytest.mark.parametrize("fail", ["push", "generate", "wake kv_cache"])
def test_a_failure_gives_the_trainer_its_memory_back(fail: str) -> None:
    both = Recorder(fail)
    with pytest.raises(RuntimeError, match=fail):
        rollout_phase(both, both, both.push, both.generate)
    assert both.calls[-2:] == [fail, "onload"]
