"""What pool workers do in the end-to-end tests."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from luspo_megatron.config import Config
from luspo_megatron.config_io import load_config
from luspo_megatron.rollout.client import Handle
from luspo_megatron.types import Group, Prompt, Sample
from tests.distributed.actor_jobs import Case, actor_of, plan_of
from tests.tiny import VOCAB


def checkpoint_logprobs(rank: int, case: Case, model: Path, checkpoint: Path, samples: Any) -> dict[int, np.ndarray]:
    """{sample: log-probs of its response} of a checkpoint's policy (this rank's share of the data)."""
    from luspo_megatron.actor import checkpoint as checkpoints
    from luspo_megatron.data.collate import unpack

    out: dict[int, np.ndarray] = {}
    with actor_of(rank, case, model) as actor:
        checkpoints.load(actor, checkpoint)
        [mini_batch] = plan_of(actor, samples)
        for micro, (values, _) in zip(mini_batch.micro_batches, actor.logprobs(mini_batch.micro_batches) or [],
                                      strict=False):
            real = [int(i) for i in micro.sample_indices if i >= 0]
            out.update(zip(real, unpack(values.numpy(), micro), strict=True))
    return out


class ScriptedController:
    """Stands in for the controller's client: responses and rewards out of a generator, no process."""

    def __init__(self, config: Config) -> None:
        self.size = config.rollout
        self.statistics: dict[str, float] = {}
        self.push_version: int | None = None

    def next_batch_async(self, step: int) -> Handle:
        answer: Future[list[Group]] = Future()
        answer.set_result(self._draw(step))
        return Handle(answer)

    def wait(self, handle: Handle, *_: Any) -> bool:
        return handle.done()

    def batch_of(self, handle: Handle) -> list[Group]:
        return handle.result()  # type: ignore[no-any-return]

    def _draw(self, step: int) -> list[Group]:
        rng = np.random.default_rng(step)
        groups = []
        for group in range(self.size.prompts_per_step):
            number = (step - 1) * self.size.prompts_per_step + group
            prompt = Prompt(str(number), (2, 3, 4), "012")
            samples = [Sample(number, i, [2, 3, 4], rng.integers(2, VOCAB, rng.integers(1, 13)).tolist(), [], "stop",
                              step, step, reward=float(i == 0 or rng.random() < 0.5), correct=bool(i % 2))
                       for i in range(self.size.group_size)]
            for sample in samples:
                sample.rollout_logprobs = [-5.5] * len(sample.response_ids)
            groups.append(Group(number, prompt, samples))
        return groups

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class NoSync:
    def push(self, version: int) -> None: ...

    def close(self) -> None: ...


def train_on_script(rank: int, flags: list[str]) -> None:
    """`luspo train` in this process with scripted rollouts and no engines."""
    from luspo_megatron import desk, trainer

    config = load_config(Config, flags)
    with mock.patch.object(desk.ControllerClient, "start", lambda *_, **__: ScriptedController(config)), \
            mock.patch.object(trainer, "weight_sync", lambda *_: NoSync()):
        _train(config)


def train_and_spoil(rank: int, flags: list[str], version: int, name: str, by: float) -> None:
    """`luspo train` in this process, but once `version` is pushed, one weight of the actor is changed in secret."""
    from luspo_megatron.weights.sync import WeightSync

    push = WeightSync.push

    def push_and_spoil(self: WeightSync, pushed: int) -> None:
        push(self, pushed)
        if pushed == version:
            self._gatherer._shards[name].view(-1)[0].add_(by)

    with mock.patch.object(WeightSync, "push", push_and_spoil):
        _train(load_config(Config, flags))


def _train(config: Config) -> None:
    from luspo_megatron import trainer
    from luspo_megatron.actor.groups import leave

    try:
        trainer.train(config)
    finally:
        leave()
