"""What a platform decides: device, backend, layer spec, optimizer kernel, megatron's fusion switches."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Platform(Protocol):
    """One instance per process. The constructor makes megatron importable and usable on the device."""

    name: str  # "cpu" | "cuda"
    backend: str  # torch.distributed backend of the model-parallel groups: "gloo" | "nccl"
    device: torch.device

    def layer_spec(self, transformer_config: Any, transformer_engine: str) -> Any:
        """TransformerBlockSubmodules of this pipeline stage (packed attention, SP-aware norms).

        Expert parameters carry TEGroupedMLP's names and checkpoint keys those of the TE spec on every platform.
        """

    def transformer_config_options(self, transformer_engine: str) -> dict[str, Any]:
        """Keyword arguments of TransformerConfig that depend on the platform (fusions, initialisation)."""

    def prepare_optimizer(self) -> str:
        """Chooses megatron's Adam kernel, once; returns its name for the log."""
