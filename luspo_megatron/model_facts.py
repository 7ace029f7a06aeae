"""ModelFacts: the sizes that the checks and plans need, read from a Hugging Face config.json with plain json.

No transformers and no torch, so that a mistake in a layout is named before anything heavy is imported. Left out:
everything that only building the model needs (rope, norms, biases).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luspo_megatron.errors import UserError


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder. A dense model has ``num_experts == 0``; ``max_positions == 0`` means "not stated"."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    ffn: int
    vocab: int
    num_experts: int = 0
    moe_ffn: int = 0
    max_positions: int = 0

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


def read_model_facts(folder: str) -> ModelFacts:
    """Read ``folder``/config.json. Raises UserError where it is missing, unreadable or lacks a size."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a Hugging Face model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not valid JSON ({error}); fetch the model again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no JSON object; fetch the model again")
    missing: list[str] = []
    heads = _size(config, missing, "num_attention_heads")
    facts = ModelFacts(
        num_layers=_size(config, missing, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(config, missing, "num_key_value_heads", default=heads),
        hidden=_size(config, missing, "hidden_size"),
        ffn=_size(config, missing, "intermediate_size"),
        vocab=_size(config, missing, "vocab_size"),
        num_experts=_size(config, missing, "num_experts", "num_local_experts", default=0),
        moe_ffn=_size(config, missing, "moe_intermediate_size", default=0),
        max_positions=_size(config, missing, "max_position_embeddings", default=0),
    )
    if missing:
        raise UserError(f"{path}: has no whole number for {', '.join(missing)}; only decoder-only models are supported")
    return facts


def _size(config: dict[str, Any], missing: list[str], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is not None:
            missing.append(f"{key} (found {value!r})")
            return 0
    if default is None:
        missing.append(keys[0])
    return default or 0
