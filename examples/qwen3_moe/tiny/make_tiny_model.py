"""A tiny Qwen3-MoE with fresh weights and its own character tokenizer, as an ordinary Hugging Face folder.

About 1.1M parameters: 4 layers (so that PP2 and PP4 divide), hidden 96, 8 experts top-2 of 104 (not 96: a transposed
expert matrix must not fit by chance). One token per character: an answer's length in tokens is its length in
characters, and its eos. Left out: any training; `luspo sft` does that.

    python examples/qwen3_moe/tiny/make_tiny_model.py --out runs/tiny --seed 0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

HEAD_DIM = 24
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*=? \n.<>_/(),abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""With the special tokens 80 in all, which tp 2 and 4 divide without padding."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of CHARACTERS, <unk> for others; decoding gives back exactly the characters."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # joins tokens as they are; the default puts spaces between them
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_config(vocabulary: int, eos_id: int, pad_id: int, *, tied: bool = False,
                head_dim: int = HEAD_DIM) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,  # of dense layers, of which there are none
        moe_intermediate_size=104,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        router_aux_loss_coef=0.0,
    )


def make_tiny_model(out: Path, seed: int, head_dim: int = HEAD_DIM) -> int:
    """Write config, generation config, safetensors and tokenizer to ``out``; gives the number of parameters."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = make_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, head_dim=head_dim)
    model = Qwen3MoeForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, help="channels of an attention head (%(default)s); "
                        "vLLM on a CPU knows 32, 64, 80, ...")
    arguments = parser.parse_args()
    parameters = make_tiny_model(arguments.out, arguments.seed, arguments.head_dim)
    print(f"{arguments.out}: Qwen3-MoE with {parameters:,} parameters and its tokenizer")


if __name__ == "__main__":
    main()
