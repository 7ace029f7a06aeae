"""Building the model of the embedded engine from a Hugging Face folder, within a stated size limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from luspo_megatron.errors import UserError

MAX_PARAMETERS = 2_000_000_000


def build_model(folder: str, dtype: str, *, threads: int = 1, device: str = "cpu", dummy_weights: bool = False,
                max_parameters: int = MAX_PARAMETERS) -> Any:
    """The causal model of ``folder`` in eval mode. ``dummy_weights``: random ones, not those in the folder.

    Raises UserError for a missing or unreadable folder, missing or corrupt weights, and models above the limit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise UserError(f"engine: {folder} has no config.json; give the folder of a Hugging Face model (model.hf)")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"engine: {folder}/config.json cannot be used: {error}") from error
    if count > max_parameters:
        raise UserError(f"engine: {folder} has {count:,} parameters; the embedded engine takes up to "
                        f"{max_parameters:,}. Use a serving engine for it (rollout.engine)")
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if getattr(config, "num_experts", None):
        # One thread: a loop over experts is fastest; with more, or on a GPU, one grouped product.
        options["experts_implementation"] = "eager" if threads == 1 and device == "cpu" else "grouped_mm"
    kind = AutoModelForCausalLM
    model = kind.from_config(config, **options) if dummy_weights else _load(kind, path, options)
    return model.to(device).eval().requires_grad_(False)


def _load(auto_model: Any, path: Path, options: dict[str, Any]) -> Any:
    if not list(path.glob("*.safetensors")):
        raise UserError(f"engine: {path} has no *.safetensors; export the model there, or start the engine with "
                        "--dummy-weights and push weights before sampling")
    try:
        model, info = auto_model.from_pretrained(path, local_files_only=True, output_loading_info=True, **options)
    except Exception as error:  # safetensors, transformers and torch each raise their own kinds
        raise UserError(f"engine: the weights in {path} cannot be loaded: {error}; export them again") from error
    if info["missing_keys"]:
        raise UserError(f"engine: {path} lacks these tensors: {', '.join(sorted(info['missing_keys']))}; export the "
                        "model again")
    return model
