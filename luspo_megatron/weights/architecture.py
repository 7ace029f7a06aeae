"""What checks, actor and weight table need to know of a Hugging Face config.json, family by family.

Plain json, no transformers and no torch, so that a mistake in a layout is named before anything heavy is imported.
Left out: sliding windows, biases other than qkv's, rope scaling other than Llama 3's, MoE beside dense layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luspo_megatron.errors import UserError
from luspo_megatron.plugin import is_plugin_name, load_plugin


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's: slow rotations are divided by `factor`, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Architecture:
    """One model; `num_experts == 0` for a dense one. `rope_theta` is never defaulted.

    `family` is a key of FAMILIES or the module:attribute of a Family from outside.
    """

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
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


@dataclass(frozen=True)
class Family:
    """What models of one kind have in common. docs/new_model.md adds one from outside the package."""

    architectures: tuple[str, ...]
    """Names in config.json's `architectures`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Architecture fields that config.json does not tell, e.g. {"qk_norm": True}."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the one value that is supported; a missing key or null counts as that value."""
    moe: bool = False
    """Whether every layer is a mixture of experts."""
    standard: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """config.json -> the same with the key names of Qwen3's config.json; may raise UserError."""
    rows: Callable[[Architecture], list[Any]] | None = None
    """Rows of the weight table; None: weights/table.py's decoder_rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More options of megatron's TransformerConfig."""


def _every_layer_moe(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UserError("decoder_sparse_step and mlp_only_layers are not supported; every layer must be MoE")
    return config


def _no_window(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mistral's first models look back 4096 tokens only, which is also what a missing key means to transformers."""
    window, positions = config.get("sliding_window", 4096), config.get("max_position_embeddings", 0)
    if window is not None and window < positions:
        raise UserError(f"sliding_window={window} is not supported; where no sequence is longer than that, set it to "
                        "null in config.json")
    return config


NO_WINDOW, NO_BIAS = {"use_sliding_window": False}, {"attention_bias": False}
FAMILIES: dict[str, Family] = {
    "qwen3": Family(("Qwen3ForCausalLM",), {"qk_norm": True}, NO_WINDOW | NO_BIAS),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",), {"qk_norm": True}, NO_WINDOW | NO_BIAS, True, _every_layer_moe),
    "qwen2": Family(("Qwen2ForCausalLM",), {"qkv_bias": True}, NO_WINDOW),
    "llama": Family(("LlamaForCausalLM",), {}, NO_BIAS | {"mlp_bias": False}),
    "mistral": Family(("MistralForCausalLM",), {}, {}, False, _no_window),
}


def find_family(name: str) -> Family:
    """The Family called `name`: a key of FAMILIES or module:attribute. Raises UserError."""
    if name in FAMILIES:
        return FAMILIES[name]
    if not is_plugin_name(name):
        raise UserError(f"model.family {name!r}: take {', '.join(FAMILIES)} or module:attribute")
    family = load_plugin(name, "model.family")
    if not isinstance(family, Family):
        raise UserError(f"model.family {name!r} is a {type(family).__name__}, not a Family; see docs/new_model.md")
    return family


def _choose(architecture: str, family: str, where: str) -> tuple[str, Family]:
    """(name, Family) of a model; `family` is what a person asked for, or empty."""
    if family:
        chosen = find_family(family)
        if is_plugin_name(family) and architecture not in chosen.architectures:
            raise UserError(f"{where}: architecture {architecture} is not of the family {family}, which is for "
                            f"{', '.join(chosen.architectures)}")
        return family, chosen
    for name, known in FAMILIES.items():
        if architecture in known.architectures:
            return name, known
    supported = ", ".join(sorted(one for known in FAMILIES.values() for one in known.architectures))
    raise UserError(f"{where}: architecture {architecture} is not supported; supported: {supported}; another is added "
                    "by model.family (docs/new_model.md)")


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Vocabulary rows of the sharded embedding and head.

    The next multiple of 128 that tp divides. Megatron pads to 128 * tp; for every power of two the rows here are the
    same, so that a checkpoint has one shape under every layout.
    """
    multiple = math.lcm(128, tp)
    return -(-vocab_size // multiple) * multiple


def read_architecture(folder: str | Path, family: str = "") -> Architecture:
    """config.json of `folder` -> Architecture; a UserError names what is missing or unsupported.

    `family` (model.family) is empty where the architecture's name in config.json says it.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a Hugging Face model folder") from None
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error}); fetch the model again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no JSON object; fetch the model again")
    return parse_architecture(config, str(path), family)


def parse_architecture(config: Mapping[str, Any], where: str = "config.json", family: str = "") -> Architecture:
    """A config.json of transformers 4 or 5 -> Architecture."""
    family, found = _choose((config.get("architectures") or ["(none)"])[0], family, where)
    try:
        config = found.standard(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    for key, allowed in {"hidden_act": "silu", **found.only}.items():
        if config.get(key, allowed) not in (allowed, None):
            raise UserError(f"{where}: {key}={config[key]} is not supported; only {allowed}")
    return _read(config, where, family, found)


def _read(config: Mapping[str, Any], where: str, family: str, found: Family) -> Architecture:
    moe = found.moe
    sizes = _Sizes(config)
    heads, hidden = sizes.need("num_attention_heads"), sizes.need("hidden_size")
    architecture = Architecture(
        family=family, num_layers=sizes.need("num_hidden_layers"), hidden=hidden, num_heads=heads,
        num_kv_heads=sizes.need("num_key_value_heads", default=heads),
        head_dim=sizes.need("head_dim", default=hidden // max(1, heads)), ffn=sizes.need("intermediate_size"),
        vocab_size=sizes.need("vocab_size"), norm_eps=sizes.number("rms_norm_eps"),
        rope_theta=_rope_theta(config, where), max_positions=sizes.need("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        # transformers 5 writes num_local_experts
        num_experts=sizes.need("num_experts", "num_local_experts") if moe else 0,
        top_k=sizes.need("num_experts_per_tok") if moe else 0,
        moe_ffn=sizes.need("moe_intermediate_size") if moe else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)), rope_scaling=_rope_scaling(config, where),
        **found.fields)
    if sizes.missing:
        raise UserError(f"{where}: has no positive number for {', '.join(sizes.missing)}; fetch the model again")
    return architecture


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


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters of transformers 5; transformers 4 has rope_theta and rope_scaling."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta"), **{k: v for k, v in parameters.items() if v is not None}}


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    theta = _rope(config)["rope_theta"]
    if theta is None:
        raise UserError(f"{where}: no rope base: neither rope_theta nor rope_parameters.rope_theta is there")
    if not isinstance(theta, int | float) or not theta > 0:
        raise UserError(f"{where}: the rope base {theta!r} is not a positive number")
    return float(theta)


def _rope_scaling(config: Mapping[str, Any], where: str) -> RopeScaling | None:
    rope = _rope(config)
    parts = (rope.get("partial_rotary_factor"), config.get("partial_rotary_factor"))
    part = next((x for x in parts if x not in (None, 1.0)), 1.0)
    if part != 1.0:
        raise UserError(f"{where}: partial_rotary_factor={part} is not supported; only 1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{where}: rope type {kind} is not supported; only default and llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    wrong = [key for key in keys if not isinstance(rope.get(key), int | float) or not rope[key] > 0]
    if wrong:
        raise UserError(f"{where}: the llama3 rope scaling has no positive number for {', '.join(wrong)}")
    factor, low, high, positions = (rope[key] for key in keys)
    return RopeScaling(float(factor), float(low), float(high), int(positions))
