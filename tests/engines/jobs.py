"""What worker processes do in the engine tests: an actor pushes its weights and scores what the engine sampled."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from luspo_megatron.config import WeightSyncConfig
from luspo_megatron.rollout.engine import GenerateRequest, Generation
from luspo_megatron.types import Sample
from tests.distributed.actor_jobs import Case, actor_of, plan_of
from tests.engines.side import RemoteSide
from tests.wire_proxy import FlippingWire

PROMPTS = [[5 + i, 9, 3 * i + 2, 17][: 2 + i % 3] for i in range(8)]
BUCKET_BYTES = 20_000  # smaller than the embedding: tensors are cut
LONG = 1500  # tokens of a sequence that is still running when a push comes


def requests(version: int, tokens: int = 24, temperature: float = 1.0) -> GenerateRequest:
    return GenerateRequest(PROMPTS, [100 * version + i for i in range(len(PROMPTS))], temperature, 1.0, tokens, [1])


def samples_of(request: GenerateRequest, generations: list[Generation]) -> list[Sample]:
    pairs = enumerate(zip(request.prompts, generations, strict=True))
    return [Sample(i // 4, i % 4, prompt, g.response_ids, g.logprobs, g.finish_reason, g.weight_version_start,
                   g.weight_version_end) for i, (prompt, g) in pairs]


def make_sync(actor: Any, side: RemoteSide | None, bucket_bytes: int = BUCKET_BYTES, timeout: float = 60.0) -> Any:
    from luspo_megatron.weights.sync import WeightSync

    return WeightSync(actor.gpt, actor.table, actor.ranks, WeightSyncConfig(bucket_bytes=bucket_bytes), dtype="float32",
                      device=actor.device, engines=side, timeout=timeout)


def actor_logprobs(actor: Any, samples: list[Sample]) -> dict[int, np.ndarray]:
    """Sample number -> log-probs of its response, where this rank computes them (the last pipeline stage)."""
    from luspo_megatron.data.collate import unpack

    out: dict[int, np.ndarray] = {}
    [mini_batch] = plan_of(actor, samples)
    outputs = actor.logprobs(mini_batch.micro_batches)
    if outputs is not None:
        for micro, (values, _) in zip(mini_batch.micro_batches, outputs, strict=True):
            real = [int(i) for i in micro.sample_indices if i >= 0]
            out.update(zip(real, unpack(values.numpy(), micro), strict=True))
    return out


def push_and_compare(rank: int, case: Case, folders: list[Any], address: Any, first_version: int,
                     bucket_bytes: int = BUCKET_BYTES, temperature: float = 1.0) -> list[dict[str, Any]]:
    """One push for each of ``folders``, in one life of actor and engine; after each, the engine samples and the actor
    scores: largest absolute difference of log-probs, the versions seen, what was sampled, and what was warned of."""
    side = RemoteSide(address) if rank == 0 else None
    out = []
    with actor_of(rank, case, folders[0]) as actor:
        actor.temperature = temperature
        sync = make_sync(actor, side, bucket_bytes)
        try:
            sync._warn = lambda text: warnings.append(text)
            for version, folder in enumerate(folders, start=first_version):
                actor.load_hf(str(folder))
                warnings: list[str] = []
                sync.push(version)
                request = requests(1, temperature=temperature)
                generations = side.call("generate", request=request) if side is not None else None
                generations = actor.ranks.broadcast(generations)
                samples = samples_of(request, generations)
                ours = actor_logprobs(actor, samples)
                worst = max((float(np.abs(np.asarray(samples[i].rollout_logprobs) - values).max())
                             for i, values in ours.items()), default=0.0)
                out.append({"worst": worst, "scored": sorted(ours), "responses": [s.response_ids for s in samples],
                            "warnings": warnings,
                            "versions": {(s.weight_version_start, s.weight_version_end) for s in samples}})
        finally:
            sync.close()
    return out


def update_in_flight(rank: int, case: Case, old: Any, new: Any, address: Any, first_version: int, wait: float) -> Any:
    """Push ``old``, start long sequences, push ``new`` ``wait`` seconds later. On the rank that scores: log-probs of
    what was sampled under the old weights, under the new ones, the samples' version spans and their own log-probs."""
    side = RemoteSide(address) if rank == 0 else None
    with actor_of(rank, case, old) as actor:
        sync = make_sync(actor, side)
        try:
            sync.push(first_version)
            actor.load_hf(str(new))  # before the sequences start: a fast engine ends them while weights are read
            request = GenerateRequest(PROMPTS, list(range(len(PROMPTS))), 1.0, 1.0, LONG, [])
            running = None
            if side is not None:
                running = side.start("generate", request=request)
                time.sleep(wait)
            sync.push(first_version + 1)
            samples = samples_of(request, actor.ranks.broadcast(running.result() if running is not None else None))
            under_new = actor_logprobs(actor, samples)
            actor.load_hf(str(old))
            under_old = actor_logprobs(actor, samples)
        finally:
            sync.close()
    numbers = range(len(samples))
    return ([under_old[i] for i in numbers], [under_new[i] for i in numbers],
            [(s.weight_version_start, s.weight_version_end) for s in samples],
            [np.asarray(s.rollout_logprobs) for s in samples])


def push_and_sample(rank: int, case: Case, folder: Any, address: Any, version: int) -> Any:
    """What the engine samples after one push."""
    side = RemoteSide(address)
    with actor_of(rank, case, folder) as actor:
        sync = make_sync(actor, side)
        try:
            sync.push(version)
            return side.call("generate", request=requests(1))
        finally:
            sync.close()


class BadWireSide(RemoteSide):
    """The engine meets the source through a proxy, which changes one byte of the first push."""

    def __init__(self, address: Any, position: int) -> None:
        super().__init__(address)
        self.position: int | None = position
        self.wires: list[FlippingWire] = []

    def meet(self, make: Any, *args: Any) -> Any:
        """host_meeting, behind a proxy."""
        meeting = make(*args)
        self.wires.append(FlippingWire(meeting.port, self.position))
        self.position = None
        meeting.port = self.wires[-1].source_port
        return meeting

    def connect_weights(self, store_host: str, store_port: int, generation: int, sources: Any, **rest: Any) -> Any:
        return super().connect_weights(store_host, self.wires[-1].receiver_port, generation, sources, **rest)


def push_through_a_bad_wire(rank: int, case: Case, folder: Any, address: Any, version: int) -> dict[str, Any]:
    """One push whose first try loses a bit in the first tensor."""
    from unittest import mock

    from luspo_megatron.weights import sync as sync_module

    side = BadWireSide(address, position=5_000)
    make = sync_module.host_meeting
    warnings: list[str] = []
    with actor_of(rank, case, folder) as actor, \
            mock.patch.object(sync_module, "host_meeting", lambda *args: side.meet(make, *args)):
        sync = make_sync(actor, side)
        sync._warn = warnings.append
        try:
            sync.push(version)
            request = requests(1)
            samples = samples_of(request, side.call("generate", request=request))
            ours = actor_logprobs(actor, samples)
        finally:
            sync.close()
            for wire in side.wires:
                wire.close()
    return {"warnings": warnings, "flipped": sum(wire.flipped for wire in side.wires),
            "worst": max(float(np.abs(np.asarray(samples[i].rollout_logprobs) - values).max())
                         for i, values in ours.items()),
            "versions": {(s.weight_version_start, s.weight_version_end) for s in samples}}
