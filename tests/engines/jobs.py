"""What worker processes do in the engine tests: an actor pushes its weights and scores what the engine sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from luspo_megatron.config import WeightSyncConfig
from luspo_megatron.rollout.engine import GenerateRequest, Generation
from luspo_megatron.types import Sample
from tests.distributed.actor_jobs import Case, actor_of, plan_of
from tests.engines.side import RemoteSide

PROMPTS = [[5 + i, 9, 3 * i + 2, 17][: 2 + i % 3] for i in range(8)]
BUCKET_BYTES = 20_000  # smaller than the embedding: tensors are cut


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
    scores: largest absolute difference of log-probs, the versions seen, and what was sampled."""
    side = RemoteSide(address) if rank == 0 else None
    out = []
    with actor_of(rank, case, folders[0]) as actor:
        actor.temperature = temperature
        sync = make_sync(actor, side, bucket_bytes)
        try:
            for version, folder in enumerate(folders, start=first_version):
                actor.load_hf(str(folder))
                sync.push(version)
                request = requests(1, temperature=temperature)
                generations = side.call("generate", request=request) if side is not None else None
                generations = actor.ranks.broadcast(generations)
                samples = samples_of(request, generations)
                ours = actor_logprobs(actor, samples)
                worst = max((float(np.abs(np.asarray(samples[i].rollout_logprobs) - values).max())
                             for i, values in ours.items()), default=0.0)
                out.append({"worst": worst, "scored": sorted(ours), "responses": [s.response_ids for s in samples],
                            "versions": {(s.weight_version_start, s.weight_version_end) for s in samples}})
        finally:
            sync.close()
    return out
