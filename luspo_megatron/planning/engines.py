"""Engines in the plan: where they run, what their weights take, and how much cache is left.

Engines share the trainers' nodes (colocated: by default the trainer hands its memory over while engines generate) or
have nodes of their own (launch.engine_nodes). The share of a GPU that an engine may use is its own flag; the defaults
here are the engines' documented ones. Weights are taken as cut evenly over an engine's processes; the cache holds one
key and one value per layer and token, on tp processes (key-value heads are repeated where there are fewer than tp).
"""

from __future__ import annotations

from dataclasses import dataclass

from luspo_megatron.config import Config
from luspo_megatron.engine_layout import EngineLayout, engine_flags, engine_layout
from luspo_megatron.errors import UserError
from luspo_megatron.hand_over import hands_over
from luspo_megatron.planning.memory import ITEM
from luspo_megatron.planning.sizes import whole_model
from luspo_megatron.rollout.supervisor import share_of
from luspo_megatron.weights.table import WeightTable

MEMORY_SHARE = {"vllm": ("--gpu-memory-utilization", 0.9), "sglang": ("--mem-fraction-static", 0.85)}


@dataclass(frozen=True)
class EngineMemory:
    """One engine; bytes are of one of its GPUs. ``cache_tokens``: of the whole engine; ``takes_turns``: with the
    memory of the trainers whose GPUs it shares."""

    kind: str
    engines: int
    layout: EngineLayout
    colocated: bool
    takes_turns: bool
    share: float
    weights: int
    cache: int
    cache_bytes_per_token: int
    cache_tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def engine_memory(config: Config, table: WeightTable, gpu_bytes: int, engine_gpus: int) -> EngineMemory | None:
    """None for engines that this program does not plan (external ones, plug-ins, and the small one on the CPU).

    ``engine_gpus``: GPUs that engines may use. Raises UserError for flags that cannot be.
    """
    rollout = config.rollout
    if rollout.engine not in MEMORY_SHARE or rollout.urls:
        return None
    words = engine_flags(rollout)
    layout = engine_layout(rollout.engine, words)
    flag, share = MEMORY_SHARE[rollout.engine]
    share = _value(words, flag, share)
    p, arch = ITEM[config.model.dtype], table.arch
    weights = p * whole_model(table)[0] // layout.workers
    per_token = 2 * arch.num_layers * max(1, arch.num_kv_heads // layout.tp) * arch.head_dim * 2  # of one GPU, bf16
    cache = int(gpu_bytes * share) - weights
    engines = config.rollout.num_engines
    if engines * layout.workers > engine_gpus:
        raise UserError(f"--rollout.num_engines {engines}: {engines} engines of {layout.workers} GPUs need "
                        f"{engines * layout.workers}, there are {engine_gpus} for them; start fewer, lower their "
                        "parallel sizes in rollout.engine_args, or raise launch.engine_nodes")
    # tp ranks see the same tokens; pipeline and data parallelism multiply the cache
    tokens = max(0, cache) // max(1, per_token // layout.pp) * layout.dp
    colocated = not config.launch.engine_nodes
    return EngineMemory(rollout.engine, engines, layout, colocated,
                        colocated and hands_over(rollout, config.launch, on_cpu=False), share, weights, max(0, cache),
                        per_token, tokens)


@dataclass(frozen=True)
class Place:
    """Where an engine, or one node's part of it, runs. ``node`` counts the allocation's nodes; ``ranks``: trainers on
    the same GPUs, if any."""

    engine: int
    node: int
    gpus: tuple[int, int]
    ranks: tuple[int, int] | None


def places(engine: EngineMemory, trainer_nodes: int, engine_nodes: int, gpus_per_node: int) -> list[Place]:
    """The map rank - GPU - engine worker, as `luspo engines` spreads engines over the trainers' or the last nodes."""
    span, each = engine.layout.nodes, engine.layout.workers_per_node
    nodes = trainer_nodes if engine.colocated else engine_nodes
    if each > gpus_per_node:
        raise UserError(f"rollout.engine_args: an engine of {engine.layout.workers} GPUs does not fit {span} "
                        f"node{'s' if span > 1 else ''} of {gpus_per_node}; lower its parallel sizes, or give it more "
                        "nodes (--nnodes)")
    if engine.colocated:
        nodes = engine.layout.spread(engine.engines, nodes)
    if nodes < span:
        raise UserError(f"rollout.engine_args: an engine over {span} nodes, and there are {nodes} for it; take more "
                        "nodes, or lower its parallel sizes and --nnodes")
    out = []
    for node in range(nodes):
        for place, index in enumerate(share_of(engine.engines, node, nodes, span)):
            gpus = (place * each, (place + 1) * each - 1)
            ranks = (node * gpus_per_node + gpus[0], node * gpus_per_node + gpus[1]) if engine.colocated else None
            out.append(Place(index, node if engine.colocated else trainer_nodes + node, gpus, ranks))
    return out


def _value(words: list[str], flag: str, default: float) -> float:
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") == flag:
            text = text if equals else words[index + 1] if index + 1 < len(words) else ""
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if not 0 < value < 1:
                raise UserError(f"rollout.engine_args: {flag} needs a number between 0 and 1, got {text!r}")
            return value
    return default
