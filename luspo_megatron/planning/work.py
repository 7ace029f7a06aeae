"""FLOPs and seconds of a step: first-order estimates that state what they assume.

Model FLOPs (multiply-add = 2) of one token at context s, causal (mean context s / 2):
    forward   2 A + 4 L q s / 2        A: parameters that a token uses, head included, embedding left out; q: all query
                                       channels; L: layers
Training a token costs 3 forwards, 4 with full recomputation; its old log-probs one more, the reference one more.

Generation is bound by reading memory: a decoding step reads an engine's weights once and the cache of every running
sequence, and computes 2 A per sequence. A sequence takes as many steps as it has tokens, and as many waves run as the
engine's cache makes necessary. The longest response sets the end of the last wave.

Weight sync: the bytes of a push over the slower of what the sending GPUs and the receiving node can move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luspo_megatron.planning.sizes import whole_model
from luspo_megatron.weights.table import WeightTable


@dataclass(frozen=True)
class Rates:
    """What the estimates assume. Defaults: H100 SXM (bf16 dense, HBM3), 400 Gb/s per GPU. ``mfu`` and ``bandwidth_use``
    are the shares of the peaks that are reached."""

    peak_flops: float = 989e12
    mfu: float = 0.3
    memory_bandwidth: float = 3.35e12
    bandwidth_use: float = 0.5
    link_bytes: float = 50e9
    link_use: float = 0.6

    def __str__(self) -> str:
        return (f"{self.peak_flops / 1e12:.0f} TFLOP/s at {self.mfu:.0%}, {self.memory_bandwidth / 1e12:.2f} TB/s at "
                f"{self.bandwidth_use:.0%}, {self.link_bytes / 1e9:.0f} GB/s per link at {self.link_use:.0%}")


def active_parameters(table: WeightTable) -> int:
    """Parameters that one token uses: ``top_k`` of the experts, the head, not the embedding's lookup."""
    arch = table.arch
    total, _ = whole_model(table)
    experts = arch.num_layers * (arch.num_experts - arch.top_k) * 3 * arch.hidden * arch.moe_ffn
    return total - experts - (0 if arch.tied else arch.vocab_size * arch.hidden)


def forward_flops(table: WeightTable, lengths: Sequence[int]) -> float:
    """FLOPs of one forward pass over sequences of these total ``lengths``."""
    arch = table.arch
    attention = 2 * arch.num_layers * arch.num_heads * arch.head_dim
    return float(2 * active_parameters(table) * sum(lengths) + attention * sum(n * n for n in lengths))


@dataclass(frozen=True)
class StepEstimate:
    """FLOPs of the whole step and seconds by phase."""

    train_flops: float
    logprob_flops: float
    rollout_seconds: float
    logprob_seconds: float
    train_seconds: float
    sync_seconds: float

    @property
    def seconds(self) -> float:
        return self.rollout_seconds + self.logprob_seconds + self.train_seconds + self.sync_seconds


@dataclass(frozen=True)
class EngineShare:
    """Generation as the estimate sees it. ``cache_tokens``: key-value cache of one engine."""

    engines: int
    gpus_per_engine: int
    weight_bytes: int
    cache_bytes_per_token: int
    cache_tokens: int


def rollout_seconds(table: WeightTable, responses: Sequence[int], prompt_tokens: int, engine: EngineShare,
                    rates: Rates) -> tuple[float, int]:
    """(seconds, sequences that run at a time on an engine)."""
    each = -(-len(responses) // engine.engines)
    mean = sum(responses) / len(responses)
    running = max(1, min(each, int(engine.cache_tokens / (prompt_tokens + mean))))
    read = engine.weight_bytes + running * engine.cache_bytes_per_token * (prompt_tokens + mean / 2)
    gpus = engine.gpus_per_engine
    step = read / (gpus * rates.memory_bandwidth * rates.bandwidth_use)
    step += 2 * active_parameters(table) * running / (gpus * rates.peak_flops * rates.mfu)
    steps = max(float(max(responses)), mean * each / running)
    return steps * step, running


def step_estimate(table: WeightTable, lengths: Sequence[int], *, gpus: int, imbalance: float, epochs: int,
                  recompute: str, reference: bool, rollout: float, sync_bytes: int, sources: int, receivers: int,
                  rates: Rates) -> StepEstimate:
    """``lengths``: total tokens per sample; ``imbalance``: fullest data-parallel rank over the mean; ``sources``: GPUs
    that send, ``receivers``: GPUs that each receive the whole push."""
    forward = forward_flops(table, lengths)
    train = forward * epochs * (4 if recompute == "full" else 3)
    logprobs = forward * epochs * (2 if reference else 1)
    speed = gpus * rates.peak_flops * rates.mfu / imbalance
    links = rates.link_bytes * rates.link_use
    # a push is broadcast: every receiver takes all bytes, the sources share the sending
    sync = max(sync_bytes / links, sync_bytes / (links * max(1, sources))) if receivers else 0.0
    return StepEstimate(train, logprobs, rollout, logprobs / speed, train / speed, sync)
