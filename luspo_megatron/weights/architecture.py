"""What checks, actor and weight table need to know of a Hugging Face config.json.

Plain json, no transformers and no torch, so that a mistake in a layout is named before anything heavy is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a Hugging Face model folder") from None
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error}); fetch the model again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no JSON object; fetch the model again")
    return parse_architecture(config, str(path))


def parse_architecture(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """A config.json of transformers 4 or 5 -> Architecture."""
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in FAMILIES:
        raise UserError(f"{where}: architecture {name} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    moe = FAMILIES[name] == "qwen3_moe"
    for key, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if config.get(key, allowed) not in (allowed, None):
            raise UserError(f"{where}: {key}={config[key]} is not supported; only {allowed}")
    if moe and (config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")):
        raise UserError(f"{where}: decoder_sparse_step and mlp_only_layers are not supported; every layer must be MoE")
    sizes = _Sizes(config)
    heads, hidden = sizes.need("num_attention_heads"), sizes.need("hidden_size")
    found = Architecture(
        family=FAMILIES[name], num_layers=sizes.need("num_hidden_layers"), hidden=hidden, num_heads=heads,
        num_kv_heads=sizes.need("num_key_value_heads", default=heads),
        head_dim=sizes.need("head_dim", default=hidden // max(1, heads)), ffn=sizes.need("intermediate_size"),
        vocab_size=sizes.need("vocab_size"), norm_eps=sizes.number("rms_norm_eps"),
        rope_theta=_rope_theta(config, where), max_positions=sizes.need("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        # transformers 5 writes num_local_experts
        num_experts=sizes.need("num_experts", "num_local_experts") if moe else 0,
        top_k=sizes.need("num_experts_per_tok") if moe else 0,
        moe_ffn=sizes.need("moe_intermediate_size") if moe else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)))
    if sizes.missing:
        raise UserError(f"{where}: has no positive number for {', '.join(sizes.missing)}; fetch the model again")
    return found


class _Sizes:
    """Reads positive numbers and remembers what is missing, so that one message names everything."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.missing: list[str] = []

    def need(self, *keys: str, default: int = 0) -> int:
        return int(self._read(keys, int, default))

    def number(self, key: str) -> float:
        return float(self._read((key,), (int, float), 0))

    def _read(self, keys: tuple[str, ...], kind: Any, default: float) -> float:
        value = next((self._config[key] for key in keys if self._config.get(key) is not None), None)
        if value is None and default:
            return default
        if isinstance(value, kind) and not isinstance(value, bool) and value > 0:
            return value  # type: ignore[no-any-return]
        self.missing.append(keys[0] if value is None else f"{keys[0]} (found {value!r})")
        return 0


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    """transformers 4 writes rope_theta, transformers 5 rope_parameters.rope_theta; neither is an error."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise UserError(f"{where}: rope type {kind} is not supported; only default")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UserError(f"{where}: no rope base: neither rope_theta nor rope_parameters.rope_theta is there")
    if not isinstance(theta, int | float) or not theta > 0:
        raise UserError(f"{where}: the rope base {theta!r} is not a positive number")
    return float(theta)
