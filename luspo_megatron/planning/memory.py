"""Bytes per GPU and per node, formula by formula.

Letters: p bytes of a parameter (2 bfloat16, 4 float32); T tokens of a full micro-batch; t = T / tp under sequence
parallelism, else T; h hidden; q, k this rank's query and key (= value) channels; f this rank's feed-forward channels;
r = t * top_k * etp tokens that reach a rank's experts when routing is balanced; V this rank's vocabulary rows.
N are the padded elements of sizes.py, S the optimizer's share of a rank.

States, exact:
    parameters   p N
    gradients    4 N                              fp32 buffers
    optimizer    8 S float32, 12 S bfloat16       two Adam moments, and the fp32 master copy where p = 2
    offloaded    0 on the GPU; on the host 12 S and 4 S of pinned gradients
    lent         while colocated engines generate, parameters and optimizer lie in pinned host memory
Activations of one layer, kept for the backward, local layer spec (`unfused`) | Transformer Engine (`fused`):
    norms        2 t h (4 + 2p)                   | 2 t h 2p              input (fp32), normed, output
    attention    p T ((q + 2k) + (q + k) + 5q)    | p T ((q + k) + (2q + 2k))
                 projections, their norms, then what scaled-dot-product attention keeps (q, k, v repeated to the query
                 heads, output) and the input of the output projection
    experts      p r (h + 5f)                     input, gate and up, silu, two products
    dense MLP    4 p T f
    full recomputation keeps p t h a layer, and one whole layer while it is being recomputed; selective gives back
    what attention keeps (4 p T q | p T (2q + 2k)).
A pipeline stage s of pp holds min(pp - s, micro-batches) of them (1F1B). The last stage adds a norm. On top comes the
larger of two moments of the backward:
    loss stage   T h (2p + 8) + 2 chunk bytes + p V h   rows gathered, their gradients, logits, the gradient of the head
    a layer      p r (2h + 3f) experts, 3 p T f dense   gradients between its operations; the first stage also p V h
The loss stage runs over all T rows: responses are nearly all of a long sample.

Left out: the allocator's fragmentation and the CUDA context, NCCL's buffers and cuBLAS workspaces. They are the margin
that `fits` keeps free. Uneven routing adds to r in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from luspo_megatron.config import BatchConfig, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig
from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.planning.sizes import StageSizes
from luspo_megatron.weights.architecture import Architecture, padded_vocab

ITEM = {"float32": 4, "bfloat16": 2}
MARGIN = 6 * 2**30  # bytes of a GPU that are left free: CUDA context, NCCL, cuBLAS, fragmentation
HOST_PER_RANK = 4 * 2**30  # bytes of a trainer process itself: interpreter, libraries, pinned staging of NCCL


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one GPU of a pipeline stage while it trains. ``host``: of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    loss_stage: int
    sync_buckets: int
    host: int

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        """Peak during an optimizer step; weight sync is another moment."""
        return self.states + self.reference + self.activations + self.loss_stage

    @property
    def syncing(self) -> int:
        return self.states + self.reference + self.sync_buckets

    def to_dict(self) -> dict[str, int]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"training": self.training, "syncing": self.syncing}

CHUNK_BYTES = 256 * 2**20  # of the loss stage on CUDA, where loss.chunk_bytes is 0 (kernels/head.py)


def trainer_memory(arch: Architecture, layout: ParallelLayout, stage: StageSizes, *, model: ModelConfig,
                   parallel: ParallelConfig, optimizer: OptimizerConfig, batch: BatchConfig, loss: LossConfig,
                   num_microbatches: int, bucket_bytes: int, reference: bool = False, fused: bool = False,
                   tokens: int | None = None) -> TrainerMemory:
    """Memory of a rank of ``stage``. ``tokens``: of the largest micro-batch (default: the budget); ``bucket_bytes``:
    largest weight bucket that it sends; ``fused``: Transformer Engine's layers."""
    p = ITEM[model.dtype]
    moment_bytes = 12 if p == 2 else 8
    shard = stage.dense.shard + stage.expert.shard
    padded = stage.dense.padded + stage.expert.padded
    layer = LayerActivations.of(arch, layout, p, tokens or batch.max_tokens_per_micro_batch,
                                parallel.sequence_parallel, fused)
    last, first = stage.stage == layout.pp - 1, stage.stage == 0
    vocab_grad = p * padded_vocab(arch.vocab_size, layout.tp) // layout.tp * arch.hidden
    in_flight = min(layout.pp - stage.stage, max(1, num_microbatches))
    kept, extra = layer.kept(model.recompute)
    activations = in_flight * (stage.layers * kept + (layer.one_norm if last else 0)) + extra
    between = layer.backward + (vocab_grad if first else 0)
    # the head's gradient takes the place of the cache
    head = layer.loss_stage + (loss.chunk_bytes or CHUNK_BYTES) + max(loss.cache_bytes, vocab_grad) if last else 0
    return TrainerMemory(
        parameters=p * (padded + stage.frozen), gradients=4 * padded,
        optimizer=0 if optimizer.cpu_offload else moment_bytes * shard,
        reference=p * stage.numel if reference else 0, activations=activations, loss_stage=max(between, head),
        # two buckets on their way, and the gathered tensors of the one that is being filled
        sync_buckets=3 * bucket_bytes,
        host=HOST_PER_RANK + (16 * shard if optimizer.cpu_offload else 0))


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer on one rank (the letters of the module's text)."""

    layer_input: int
    norms: int
    attention: int
    attention_core: int
    mlp: int
    backward: int
    loss_stage: int
    one_norm: int

    @classmethod
    def of(cls, arch: Architecture, layout: ParallelLayout, p: int, tokens: int, sequence_parallel: bool,
           fused: bool) -> LayerActivations:
        T, h = tokens, arch.hidden
        t = T // layout.tp if sequence_parallel else T
        q, k = arch.num_heads * arch.head_dim // layout.tp, arch.num_kv_heads * arch.head_dim // layout.tp
        one_norm = t * h * (2 * p if fused else 4 + 2 * p)
        core = p * T * (2 * q + 2 * k) if fused else 4 * p * T * q
        attention = p * T * (q + k) + core if fused else p * T * ((q + 2 * k) + (q + k) + q) + core
        if arch.is_moe:
            r, f = t * arch.top_k * layout.etp, arch.moe_ffn // layout.etp
            mlp, backward = p * r * (h + 5 * f), p * r * (2 * h + 3 * f)
        else:
            f = arch.ffn // layout.tp
            mlp, backward = 4 * p * T * f, 3 * p * T * f
        return cls(p * t * h, 2 * one_norm, attention, core, mlp, backward, T * h * (2 * p + 8), one_norm)

    @property
    def whole(self) -> int:
        return self.norms + self.attention + self.mlp

    def kept(self, recompute: str) -> tuple[int, int]:
        """(bytes that a layer keeps until its backward, bytes while one layer is recomputed)."""
        if recompute == "full":
            return self.layer_input, self.whole
        if recompute == "selective":
            return self.whole - self.attention_core, self.attention_core
        return self.whole, 0
