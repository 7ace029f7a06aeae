"""The Megatron model's logits against transformers', every position and vocabulary entry, on a packed micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.actor_jobs import Case, actor_of
from tests.tiny import samples_of, save_model
from tests.workers import pool


def packed_logits(rank: int, case: Case, folder: Any, samples: Any) -> Any:
    """(logits [T, true vocabulary shard], cu_seqlens, token ids) with megatron's own output layer."""
    import torch

    from luspo_megatron.data.collate import pack
    from luspo_megatron.platform.packing import pack_params

    with actor_of(rank, case, folder) as actor, torch.no_grad():
        micro = pack(samples, range(len(samples)), case.layout.token_multiple(True))
        packing = pack_params(micro.cu_seqlens, actor.device)
        assert packing.positions is not None
        logits = actor.gpt(input_ids=torch.from_numpy(micro.token_ids)[None], position_ids=packing.positions[None],
                           attention_mask=None, packed_seq_params=packing)
        return logits[0].numpy(), micro


@pytest.mark.parametrize(("kind", "tied", "case"), [
    ("moe", False, Case()), ("moe", True, Case(world=2, tp=2, ep=2)), ("dense", True, Case()),
    ("dense", False, Case(world=2, tp=2)),
], ids=lambda x: str(getattr(x, "layout", x)))
def test_logits(kind: str, tied: bool, case: Case, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", kind, tied=tied)
    samples = samples_of(seed=2, groups=3, group_size=2)
    results = pool(case.world).run(packed_logits, case, folder, samples)
    micro = results[0][1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    got = np.concatenate([logits for logits, _ in results], -1)[:, : model.config.vocab_size]
    for i in range(len(samples)):
        start, stop = micro.cu_seqlens[i], micro.cu_seqlens[i + 1]
        with torch.no_grad():
            want = model(torch.from_numpy(micro.token_ids[start:stop])[None]).logits[0].numpy()
        scale = np.abs(want).max()
        assert scale > 0.1
        assert np.abs(got[start:stop] - want).max() <= 1e-5 * scale
