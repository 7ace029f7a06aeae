"""What transformers says about the tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def top_experts(folder: Path, ids: list[int]) -> np.ndarray:
    """Experts that transformers' router chooses, [tokens, layers, topk]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
    topk = model.config.num_experts_per_tok
    return np.stack([logits.topk(topk, -1).indices.numpy() for logits in output.router_logits], 1)
