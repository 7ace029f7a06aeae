"""The order of the colocated memory hand-over, by recorded calls."""

from __future__ import annotations

import pytest

from luspo_megatron.hand_over import ORDER, rollout_phase


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


@pytest.mark.parametrize("fail", ["push", "generate", "wake kv_cache"])
def test_a_failure_gives_the_trainer_its_memory_back(fail: str) -> None:
    both = Recorder(fail)
    with pytest.raises(RuntimeError, match=fail):
        rollout_phase(both, both, both.push, both.generate)
    assert both.calls[-2:] == [fail, "onload"]
