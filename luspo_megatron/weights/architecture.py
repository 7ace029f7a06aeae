"""What the actor and the weight table need to know of a Hugging Face config.json. Pure Python."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luspo_megatron.errors import UserError

FAMILIES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}


@dataclass(frozen=True)
class Architecture:
    """Sizes of one model; `num_experts == 0` for a dense one. `rope_theta` is never defaulted."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    num_experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    norm_topk_prob: bool = True

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Vocabulary rows of the sharded embedding and head.

    The next multiple of 128 that tp divides. Megatron pads to 128 * tp; for every power of two the rows here are the
    same, so that a checkpoint has one shape under every layout.
    """
    multiple = math.lcm(128, tp)
    return -(-vocab_size // multiple) * multiple


def read_architecture(folder: str | Path) -> Architecture:
    """config.json of `folder` -> Architecture; a UserError names what is missing or unsupported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; model.hf must be a Hugging Face model folder with a config.json")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    return parse_architecture(config, str(path))


def parse_architecture(config: dict[str, Any], where: str = "config.json") -> Architecture:
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in FAMILIES:
        raise UserError(f"{where}: architecture {name} is not supported; supported: {', '.join(sorted(FAMILIES))}")

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise UserError(f"{where}: key {key} is missing")
        return config[key]

    for key, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if config.get(key, allowed) not in (allowed, None):
            raise UserError(f"{where}: {key}={config[key]} is not supported; only {allowed}")
    moe = FAMILIES[name] == "qwen3_moe"
    if moe and "num_experts" not in config:  # the name that transformers 5 writes
        config = {**config, "num_experts": config.get("num_local_experts")}
    if moe and (config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")):
        raise UserError(f"{where}: decoder_sparse_step and mlp_only_layers are not supported; every layer must be MoE")
    heads = need("num_attention_heads")
    return Architecture(
        family=FAMILIES[name], num_layers=need("num_hidden_layers"), hidden=need("hidden_size"), num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or need("hidden_size") // heads, ffn=need("intermediate_size"),
        vocab_size=need("vocab_size"), norm_eps=need("rms_norm_eps"), rope_theta=_rope_theta(config, where),
        max_positions=need("max_position_embeddings"), tied=bool(config.get("tie_word_embeddings", False)),
        num_experts=need("num_experts") if moe else 0, top_k=need("num_experts_per_tok") if moe else 0,
        moe_ffn=need("moe_intermediate_size") if moe else 0, norm_topk_prob=bool(config.get("norm_topk_prob", False)))


def _rope_theta(config: dict[str, Any], where: str) -> float:
    """transformers 4 writes rope_theta, transformers 5 rope_parameters.rope_theta; neither is an error."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise UserError(f"{where}: rope type {kind} is not supported; only default")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UserError(f"{where}: no rope base: neither rope_theta nor rope_parameters.rope_theta is there")
    return float(theta)
