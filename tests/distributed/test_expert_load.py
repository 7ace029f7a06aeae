"""Tokens per expert against transformers' own router choices, under layouts that spread tokens and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luspo_megatron.actor.expert_load import load_metrics
from luspo_megatron.types import Sample
from tests.distributed.actor_jobs import Case, actor_of, plan_of
from tests.tiny import samples_of, save_model
from tests.workers import pool


def counts_of(rank: int, case: Case, folder: Any, samples: list[Sample]) -> tuple[dict[int, np.ndarray], int]:
    """(what this rank counted, padding tokens of its micro-batches); counting twice, so that `take` must start anew."""
    with actor_of(rank, case, folder) as actor:
        [mini_batch] = plan_of(actor, samples)
        actor.logprobs(mini_batch.micro_batches)
        actor.expert_load.take()
        actor.logprobs(mini_batch.micro_batches)
        padding = sum(int(np.diff(micro.cu_seqlens)[micro.sample_indices < 0].sum())
                      for micro in mini_batch.micro_batches)
        return actor.expert_load.take(), padding


def reference(folder: Path, samples: list[Sample]) -> dict[int, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    layers = [np.zeros(model.config.num_experts, int) for _ in range(model.config.num_hidden_layers)]
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]]), output_router_logits=True)
        for counts, router in zip(layers, logits.router_logits, strict=True):
            chosen = router.topk(model.config.num_experts_per_tok, -1).indices
            counts += np.bincount(chosen.flatten().numpy(), minlength=model.config.num_experts)
    return dict(enumerate(layers, 1))


@pytest.mark.parametrize("case", [Case(), Case(world=4, tp=2, ep=2), Case(world=4, pp=2, ep=2), Case(world=2)],
                         ids=lambda case: str(case.layout))
def test_counts(case: Case, tmp_path: Path) -> None:
    folder, samples = save_model(tmp_path / "model", "moe"), samples_of(seed=6)
    want = reference(folder, samples)
    results = pool(case.world).run(counts_of, case, folder, samples)
    found: dict[int, np.ndarray] = {}
    for counts, _ in results:
        for layer, values in counts.items():
            found[layer] = found.get(layer, 0) + values
    # ranks of one data-parallel part (tp, pp) share its micro-batches and so its padding
    dp = case.layout.dp
    padding = sum(n for _, n in results) // (case.world // dp)
    assert found.keys() == want.keys()
    for layer, counts in want.items():
        extra = found[layer] - counts
        assert extra.min() >= 0 and extra.sum() == 2 * padding, (layer, found[layer], counts, padding)
    metrics = load_metrics([counts for counts, _ in results])
    if not padding:
        assert metrics["expert_load_max"] == max(c.max() / c.mean() for c in want.values()) > 1.1


def test_metrics() -> None:
    parts = [{1: np.array([4, 0, 0, 0]), 2: np.array([1, 1, 1, 1])}, {1: np.array([2, 2, 0, 0])}, {}]
    assert load_metrics(parts) == {"expert_load_max": 3.0, "expert_idle_fraction": 0.25}
    assert load_metrics([{}, {}]) == {}
