"""What pool workers do in the end-to-end tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed.actor_jobs import Case, actor_of, plan_of


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
