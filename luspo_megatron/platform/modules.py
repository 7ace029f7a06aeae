"""Layer modules of the local (non Transformer Engine) spec that megatron-core lacks: norm, attention, expert names.

megatron-core's local spec has an RMSNorm that refuses sequence parallelism, a core attention without packing, and
experts (SequentialMLP) whose parameters are named differently from TEGroupedMLP's. These three fill the gaps for the
CPU platform and for CUDA without Transformer Engine. Context parallelism is not here yet.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from luspo_megatron.platform.packing import Packing


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with fp32 statistics whose weight gradient is reduced over TP under SP.

    x [..., hidden] -> [..., hidden], same dtype.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # read by finalize_model_grads: replicated weight, sequence-sharded input
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class PackedCausalAttention(torch.nn.Module):
    """Causal attention of packed (thd) sequences, without a T x T mask.

    Sequences of similar lengths run as one right-padded batch (causality keeps padding out of every real row);
    otherwise each runs by itself. query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads * d].
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: Any,
                 attention_dropout: float | None = None, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
                attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: Any = None,
                **_: Any) -> torch.Tensor:
        if packed_seq_params is None:
            raise RuntimeError("attention runs on packed (thd) sequences only; packed_seq_params is missing")
        packing: Packing = packed_seq_params
        total, heads, width = query.shape
        if packing.rectangle is not None and packing.flat is not None:
            batched = (x[packing.rectangle].transpose(1, 2) for x in (query, key, value))
            out = self._attend(*batched).transpose(1, 2).reshape(-1, heads, width)[packing.flat]
        else:
            parts = (x.split(packing.lengths) for x in (query, key, value))
            out = torch.cat([self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in qkv)).squeeze(0).transpose(0, 1)
                             for qkv in zip(*parts, strict=True)])
        return out.reshape(total, heads * width)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[n, heads, S, d] with [n, kv_heads, S, d] -> [n, heads, S, d]"""
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:  # faster than enable_gqa on CPU
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)


class _ExpertWeights(torch.nn.Module):
    """Holds weight0, weight1, ... of one linear layer of all local experts, as TEGroupedLinear does."""


class NamedSequentialMLP(SequentialMLP):
    """SequentialMLP with TEGroupedMLP's parameter names (`linear_fc1.weight{i}`), so one weight table serves both.

    The expert modules stay reachable for forward and for checkpoints (whose keys are the same for both classes),
    but are not registered as children: their weights are registered once, under the grouped names.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts = list(self.local_experts)
        del self.local_experts
        object.__setattr__(self, "local_experts", experts)
        for layer in ("linear_fc1", "linear_fc2"):
            holder = _ExpertWeights()
            setattr(self, layer, holder)
            for i, expert in enumerate(experts):
                holder.register_parameter(f"weight{i}", getattr(expert, layer).weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """SequentialMLP's shards (keys on disk are those of TEGroupedMLP) under this module's own parameter names."""
        shards = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        grouped = re.compile(re.escape(prefix) + r"local_experts\.(\d+)\.(linear_fc\d)\.weight")
        return {f"{prefix}{match[2]}.weight{match[1]}": value
                for name, value in shards.items() if (match := grouped.fullmatch(name))}


def local_block_spec(config: TransformerConfig) -> Any:
    """The local GPT block spec of this pipeline stage with the modules above and spec-independent checkpoint keys."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    layers = []
    for layer in block.layer_specs:
        sub = layer.submodules
        attention = sub.self_attention
        attention = dataclasses.replace(attention, submodules=dataclasses.replace(
            attention.submodules, core_attention=PackedCausalAttention,
            q_layernorm=RMSNorm if config.qk_layernorm else attention.submodules.q_layernorm,
            k_layernorm=RMSNorm if config.qk_layernorm else attention.submodules.k_layernorm))
        is_moe = config.num_moe_experts is not None and _is_moe(sub.mlp)
        keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        mlp = sub.mlp
        if is_moe:
            # The TE spec fuses the norm into fc1 for dense layers only; MoE keeps pre_mlp_layernorm under its own key.
            mlp = _with_experts(mlp, NamedSequentialMLP)
        else:
            keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        layers.append(dataclasses.replace(layer, submodules=dataclasses.replace(
            sub, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, self_attention=attention, mlp=mlp,
            sharded_state_dict_keys_map=keys)))
    return dataclasses.replace(block, layer_specs=layers, layer_norm=RMSNorm)


def _is_moe(mlp_builder: Any) -> bool:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return getattr(mlp_builder, "func", None) is MoELayer


def _with_experts(mlp_builder: Any, experts: type) -> Any:
    """The same MoE builder (a functools.partial of MoELayer) with another class of experts."""
    import functools

    submodules = mlp_builder.keywords["submodules"]
    builder = submodules.experts
    if isinstance(builder, functools.partial):
        builder = functools.partial(experts, *builder.args, **builder.keywords)
    else:
        raise RuntimeError(f"megatron-core's MoE spec changed: experts builder is {type(builder).__name__}")
    return functools.partial(mlp_builder.func, *mlp_builder.args,
                             **{**mlp_builder.keywords, "submodules": dataclasses.replace(submodules, experts=builder)})
