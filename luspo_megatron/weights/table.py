"""The one table of names: Megatron parameter <-> Hugging Face tensors, for loading, saving, export and weight sync.

A family is a list of rows, one per tensor kind; all built-in ones are `decoder_rows` with what their Architecture says.
Both names of a norm are listed: the local layer spec keeps norms by themselves, the Transformer Engine spec fuses them
into the next linear layer. Layers and experts are numbered globally; `WeightTable.find` turns the local number that a
pipeline stage or expert rank uses into the global one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from luspo_megatron.weights.architecture import Architecture, find_family
from luspo_megatron.weights.layouts import FusedQKV, GateUp, Layout, Replicated, Shape, Sharded, Vocab
from luspo_megatron.weights.manifest import ITEM_SIZES


@dataclass(frozen=True)
class Row:
    """One tensor kind. Names may hold {layer} and {expert}; `aliases` are other Megatron names of the same thing."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[Shape, ...]
    aliases: tuple[str, ...] = ()
    load_only: bool = False  # a second copy of another row's tensors (the tied head of the last pipeline stage)

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron


@dataclass(frozen=True)
class Entry:
    """One global parameter: a row at a layer and an expert (-1 where it has none)."""

    row: Row
    layer: int = -1
    expert: int = -1

    @property
    def megatron(self) -> str:
        return self.row.megatron.format(layer=self.layer, expert=self.expert)

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.row.hf)

    @property
    def hf_tensors(self) -> tuple[tuple[str, Shape], ...]:
        return tuple(zip(self.hf_names, self.row.shapes, strict=True))


def decoder_rows(arch: Architecture) -> list[Row]:
    """A pre-norm decoder by the names that Llama brought up (transformers' modeling_llama.py, as they are on disk) and
    Mistral, Qwen2, Qwen3 and Qwen3-MoE kept."""
    h, q, kv = arch.hidden, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    layer, hf_layer = "decoder.layers.{layer}.", "model.layers.{layer}."
    vocab = Vocab(arch.vocab_size)
    rows = [
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocab, ((arch.vocab_size, h),)),
        Row("output_layer.weight", ("model.embed_tokens.weight" if arch.tied else "lm_head.weight",), vocab,
            ((arch.vocab_size, h),), load_only=arch.tied),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated(), ((h,),)),
        Row(layer + "input_layernorm.weight", (hf_layer + "input_layernorm.weight",), Replicated(), ((h,),),
            aliases=(layer + "self_attention.linear_qkv.layer_norm_weight",)),
        Row(layer + "self_attention.linear_qkv.weight", tuple(hf_layer + f"self_attn.{x}_proj.weight" for x in "qkv"),
            FusedQKV(arch.num_kv_heads, arch.head_dim), ((q, h), (kv, h), (kv, h))),
        Row(layer + "self_attention.linear_proj.weight", (hf_layer + "self_attn.o_proj.weight",), Sharded(1),
            ((h, q),)),
        Row(layer + "pre_mlp_layernorm.weight", (hf_layer + "post_attention_layernorm.weight",), Replicated(), ((h,),),
            aliases=(layer + "mlp.linear_fc1.layer_norm_weight",)),
    ]
    if arch.qkv_bias:
        rows.append(Row(layer + "self_attention.linear_qkv.bias",
                        tuple(hf_layer + f"self_attn.{x}_proj.bias" for x in "qkv"),
                        FusedQKV(arch.num_kv_heads, arch.head_dim), ((q,), (kv,), (kv,))))
    if arch.qk_norm:
        rows += [Row(layer + f"self_attention.{x}_layernorm.weight", (hf_layer + f"self_attn.{x}_norm.weight",),
                     Replicated(), ((arch.head_dim,),)) for x in "qk"]
    if arch.is_moe:
        expert = hf_layer + "mlp.experts.{expert}."
        rows += [
            Row(layer + "mlp.router.weight", (hf_layer + "mlp.gate.weight",), Replicated(), ((arch.num_experts, h),)),
            Row(layer + "mlp.experts.linear_fc1.weight{expert}",
                (expert + "gate_proj.weight", expert + "up_proj.weight"), GateUp(),
                ((arch.moe_ffn, h), (arch.moe_ffn, h))),
            Row(layer + "mlp.experts.linear_fc2.weight{expert}", (expert + "down_proj.weight",), Sharded(1),
                ((h, arch.moe_ffn),)),
        ]
    else:
        mlp = hf_layer + "mlp."
        rows += [
            Row(layer + "mlp.linear_fc1.weight", (mlp + "gate_proj.weight", mlp + "up_proj.weight"), GateUp(),
                ((arch.ffn, h), (arch.ffn, h))),
            Row(layer + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), Sharded(1), ((h, arch.ffn),)),
        ]
    return rows


class WeightTable:
    """The rows of one model and what follows from them."""

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch
        self.rows = (find_family(arch.family).rows or decoder_rows)(arch)

    def entries(self) -> Iterator[Entry]:
        """Every global parameter once, in a fixed order; load-only copies left out."""
        head = [row for row in self.rows if not row.per_layer and not row.load_only]
        yield from (Entry(row) for row in head)
        for layer in range(self.arch.num_layers):
            for row in self.rows:
                if row.per_layer and not row.per_expert:
                    yield Entry(row, layer)
            for expert in range(self.arch.num_experts):
                yield from (Entry(row, layer, expert) for row in self.rows if row.per_expert)

    @cached_property
    def hf_shapes(self) -> dict[str, Shape]:
        """Every Hugging Face tensor of the model with its shape, in table order."""
        return {name: shape for entry in self.entries() for name, shape in entry.hf_tensors}

    def largest_bytes(self, dtype: str) -> int:
        """Bytes of the largest Hugging Face tensor, rounded up to a bucket's alignment."""
        return max(prod(shape) for shape in self.hf_shapes.values()) * ITEM_SIZES[dtype] + 8

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        def pattern(name: str) -> re.Pattern[str]:
            escaped = re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)")
            return re.compile(escaped.replace(r"\{expert\}", r"(?P<expert>\d+)"))

        return [(pattern(name), row) for row in self.rows for name in (row.megatron, *row.aliases)]

    def find(self, name: str, *, layer_offset: int = 0, expert_offset: int = 0) -> Entry:
        """Local Megatron parameter name -> Entry; KeyError for a name that no row describes."""
        for pattern, row in self._patterns:
            if match := pattern.fullmatch(name):
                found = match.groupdict()
                return Entry(row, int(found["layer"]) + layer_offset if row.per_layer else -1,
                             int(found["expert"]) + expert_offset if row.per_expert else -1)
        raise KeyError(f"no row of the weight table describes {name}")
