"""Tiny Hugging Face models and samples for tests. hidden != ffn != moe_ffn; rope theta is not the default one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from luspo_megatron.types import Sample

VOCAB = 301  # not a multiple of anything that padding uses


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {}),
    "moe": ("Qwen3Moe", {"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2,
                         "norm_topk_prob": True}),
    "qwen2": ("Qwen2", {"head_dim": 16}),  # its config does not keep head_dim: hidden / heads
    "llama": ("Llama", {}),
    # wavelengths on both sides of 64 / 4 and 64 / 1 and between
    "llama3": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e2, "factor": 8.0,
                                             "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                             "original_max_position_embeddings": 64}}),
    "mistral": ("Mistral", {"num_attention_heads": 8, "sliding_window": None}),
    "phi3": ("Phi3", {"head_dim": 16}),
}


def config_of(kind: str, *, tied: bool = False, layers: int = 4) -> Any:
    import transformers

    name, own = KINDS[kind]
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
        "tie_word_embeddings": tied, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "attn_implementation": "sdpa", "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }
    return getattr(transformers, f"{name}Config")(architectures=[f"{name}ForCausalLM"], **{**common, **own})


def save_model(folder: Path, kind: str, *, tied: bool = False, layers: int = 4, seed: int = 0) -> Path:
    """A randomly initialised model with weights large enough that every layer matters; norms are not all ones."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{KINDS[kind][0]}ForCausalLM")
    model = model_class(config_of(kind, tied=tied, layers=layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(2.0)
    model.save_pretrained(folder)
    return folder


def samples_of(seed: int = 0, *, groups: int = 4, group_size: int = 4, longest: int = 20) -> list[Sample]:
    """Samples of uneven lengths with ids below VOCAB."""
    rng = np.random.default_rng(seed)
    out = []
    for group in range(groups):
        prompt = rng.integers(2, VOCAB, rng.integers(2, 8)).tolist()
        for index in range(group_size):
            response = rng.integers(2, VOCAB, rng.integers(1, longest + 1)).tolist()
            out.append(Sample(group, index, prompt, response, (-5 + rng.normal(size=len(response))).tolist(), "stop",
                              0, 0, reward=float(rng.integers(0, 2))))
    return out
