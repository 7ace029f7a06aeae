"""How many tokens each expert is given, counted while log-probs are computed (every token of a step once).

Hooks on megatron's routers; nothing is added to what they compute. Padding of the packed micro-batches is routed like
other tokens and counted with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class ExpertLoad:
    """Counts of this rank's tokens (its data-parallel and sequence-parallel part) in this pipeline stage's layers."""

    def __init__(self, gpt: Any) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self._counts: dict[int, Tensor] = {}
        self._counting = False
        for module in gpt.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(self._count)

    def _count(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if self._counting:
            routed = output[1].sum(0, dtype=torch.int64)  # routing map [tokens, experts]
            before = self._counts.get(router.layer_number)
            self._counts[router.layer_number] = routed if before is None else before + routed

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def take(self) -> dict[int, np.ndarray]:
        """{layer number: [experts] tokens} since the last call."""
        counts, self._counts = self._counts, {}
        return {layer: count.cpu().numpy() for layer, count in counts.items()}


def load_metrics(parts: Sequence[dict[int, np.ndarray]]) -> dict[str, float]:
    """Metrics from what all ranks took; none for a dense model. Parts of one layer add up."""
    layers: dict[int, np.ndarray] = {}
    for part in parts:
        for layer, counts in part.items():
            layers[layer] = layers.get(layer, 0) + counts
    if not layers:
        return {}
    return {"expert_load_max": max(float(counts.max() / counts.mean()) for counts in layers.values()),
            "expert_idle_fraction": float(np.mean([(counts == 0).mean() for counts in layers.values()]))}
