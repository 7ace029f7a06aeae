"""Tiny Mixture-of-Experts models that the engines' CPU kernels take (hidden and head sizes are multiples of 32)."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import config_of

MOST_TOKENS = 2048  # so that a sequence can take seconds


def save_model(folder: Path, seed: int) -> Path:
    """Random weights, large enough that every layer matters; norms are not all ones. With a tokenizer, which vLLM wants
    to see even where only token ids travel."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

    config = config_of("moe", layers=2)
    config.max_position_embeddings = MOST_TOKENS
    config.head_dim, config.moe_intermediate_size = 32, 32
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(folder)
    return folder
