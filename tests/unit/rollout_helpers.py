"""Tiny models and pushes for the rollout tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from luspo_megatron.weights.manifest import Bucket, Manifest, TensorSlice

VOCABULARY = 32
EOS = 1


def tiny_model(kind: str, seed: int, tied: bool = False, experts: str = "eager") -> Any:
    """A random Qwen3-MoE ("moe") or Qwen3 ("dense") model; hidden differs from every ffn size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": tied, "initializer_range": 0.15, "eos_token_id": EOS, "bos_token_id": None,
        "pad_token_id": 0,
    }
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**common)).eval()
    config = Qwen3MoeConfig(**common, moe_intermediate_size=40, num_experts=4, num_experts_per_tok=2,
                            norm_topk_prob=True)
    config._experts_implementation = experts
    return Qwen3MoeForCausalLM(config).eval()


def disk_tensors(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes: the independent reference for names and layouts."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def make_push(version: int, tensors: dict[str, torch.Tensor], bucket_bytes: int, source: int = 0
              ) -> tuple[Manifest, list[torch.Tensor]]:
    """Fill buckets of at most ``bucket_bytes`` greedily, cutting tensors; (manifest, buffers)."""
    pieces: list[list[tuple[TensorSlice, torch.Tensor]]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        flat, dtype, size = tensor.flatten(), str(tensor.dtype).removeprefix("torch."), tensor.element_size()
        start = 0
        while start < flat.numel():
            room = (bucket_bytes - used) // size
            if room == 0:
                pieces.append([])
                used = 0
                continue
            part = flat[start : start + room]
            piece = TensorSlice(name, dtype, tuple(tensor.shape), start, part.numel(), used)
            pieces[-1].append((piece, part))
            used += piece.nbytes
            start += part.numel()
    buckets, buffers = [], []
    for bucket in pieces:
        buffer = torch.cat([part.contiguous().view(torch.uint8) for _, part in bucket])
        buckets.append(Bucket(source, buffer.numel(), tuple(piece for piece, _ in bucket)))
        buffers.append(buffer)
    return Manifest(version, tuple(buckets)), buffers


def reference_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    """Log-probs of the response by one full forward without padding or cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].double()
    rows = torch.log_softmax(logits / (temperature or 1.0), -1)
    return [rows[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]


def check_logprobs(found: Sequence[float], model: Any, prompt: Sequence[int], response: Sequence[int],
                   temperature: float = 1.0) -> None:
    """The log-probs are those of one full forward, to 1e-6 of the largest: both are float32 and batched differently."""
    expected = np.array(reference_logprobs(model, list(prompt), list(response), temperature))
    largest = np.abs(expected).max()
    assert largest > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * largest)


def write_tokenizer(folder: Path, characters: str = "0123456789+-=>< ") -> None:
    """A character tokenizer: ids 0 <pad>, 1 <eos>, then the characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": EOS, **{c: i + 2 for i, c in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def write_prompts(path: Path, count: int) -> None:
    rows = [{"prompt": f"{i // 10}+{i % 10}=", "answer": str(i // 10 + i % 10)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
