"""The actor: forward passes and optimizer steps of the policy on Megatron shards.

Every rank calls every method with the same mini-batch plan (its own data-parallel share of the data). Results that
exist on the last pipeline stage only are None elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from luspo_megatron.actor.expert_load import ExpertLoad
from luspo_megatron.actor.loss_stage import HeadRequest, Objective, head, schedule_loss
from luspo_megatron.actor.model import build_model
from luspo_megatron.actor.optimizer import build_optimizer, set_rates, wrap_ddp
from luspo_megatron.config import BatchConfig, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig
from luspo_megatron.platform import platform
from luspo_megatron.ranks import Ranks
from luspo_megatron.types import MicroBatch, MiniBatch
from luspo_megatron.weights.architecture import Architecture
from luspo_megatron.weights.load import load_hf
from luspo_megatron.weights.table import WeightTable

MicroObjective = Callable[[int, MicroBatch], Objective]
"""(index of the micro-batch in its mini-batch, the micro-batch) -> objective on its [T] vectors"""


@dataclass(frozen=True)
class TrainResult:
    """One optimizer step. `sums` and `per_sample` are filled on rank 0 only.

    sums: summable statistics over all micro-batches and data-parallel ranks (loss, counts, ...).
    per_sample: statistic -> {index of the sample in the step: value}.
    """

    gradient_norm: float
    sums: dict[str, float]
    per_sample: dict[str, dict[int, float]]


class Actor:
    """One policy (or, with `trainable=False`, a reference policy that only runs forward)."""

    def __init__(self, arch: Architecture, ranks: Ranks, *, model: ModelConfig, parallel: ParallelConfig,
                 optimizer: OptimizerConfig, batch: BatchConfig, loss: LossConfig | None = None,
                 temperature: float = 1.0, trainable: bool = True) -> None:
        self.arch, self.ranks, self.batch, self.temperature = arch, ranks, batch, temperature
        self.settings, self.loss = optimizer, loss or LossConfig()
        self.table = WeightTable(arch)
        self.device = platform().device
        self._aux_loss = bool(arch.is_moe and model.router_aux_loss_coef)
        self.gpt = build_model(arch, model, ranks.layout, parallel.sequence_parallel)
        self.expert_load = ExpertLoad(self.gpt)
        self.model: Any = self.gpt
        self.optimizer: Any = None
        if trainable:
            self.model = wrap_ddp(self.gpt, parallel.distributed_optimizer)
            self.model.broadcast_params()
            self.optimizer = build_optimizer(self.model, optimizer, parallel.distributed_optimizer)
            self._connect_schedule()

    def _connect_schedule(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        config = self.gpt.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = self.model.no_sync

    def load_hf(self, folder: str) -> None:
        """Takes the weights of a Hugging Face folder; the optimizer's master copies follow."""
        load_hf(self.gpt, folder, self.table, self.ranks.layout, self.ranks.rank)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    # ------------------------------------------------------------------ forward and backward
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]] | None:
        """(log-probs [T], entropy [T]) of each micro-batch, 0 outside the response mask; None off the last stage."""
        with torch.no_grad(), self.expert_load.counting():
            outputs = self._run(micro_batches, objective=None)
        return [(out[0], out[1]) for out in outputs] if self.ranks.is_last_stage else None

    def train_step(self, mini_batch: MiniBatch, objective: MicroObjective, lr: float) -> TrainResult:
        """One optimizer step on one mini-batch: forward, backward, gradient reduction, clip, update."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self._run(mini_batch.micro_batches, objective)
        set_rates(self.optimizer, lr, self.settings.weight_decay)
        successful, gradient_norm, _ = self.optimizer.step()
        if not successful:
            raise RuntimeError("the optimizer found inf or NaN gradients")
        sums, per_sample = self._collect(mini_batch.micro_batches, outputs)
        return TrainResult(float(gradient_norm or 0.0), sums, per_sample)

    def _run(self, micro_batches: Sequence[MicroBatch], objective: MicroObjective | None) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        schedule = get_forward_backward_func()
        return schedule(  # type: ignore[no-any-return]
            forward_step_func=partial(self._forward_step, objective=objective, num_microbatches=len(micro_batches)),
            data_iterator=enumerate(micro_batches), model=[self.model], num_microbatches=len(micro_batches),
            # with variable_seq_lengths the shapes travel with the tensors; these two are only placeholders
            seq_length=self.batch.max_tokens_per_micro_batch, micro_batch_size=1, forward_only=objective is None)

    def _forward_step(self, data: Iterator[tuple[int, MicroBatch]], model: Any, *, objective: MicroObjective | None,
                      num_microbatches: int) -> tuple[Tensor, Any]:
        from luspo_megatron.platform.packing import pack_params

        index, micro = next(data)
        tokens = self._tensor(micro.token_ids)[None]
        packing = pack_params(micro.cu_seqlens, self.device)
        request = HeadRequest(self._tensor(micro.targets), self._tensor(micro.response_mask), self.arch.vocab_size,
                              self.temperature, self.loss)
        output = model(input_ids=tokens, position_ids=packing.positions[None],  # type: ignore[index]
                       attention_mask=None, packed_seq_params=packing, padding_mask=self._padding_mask(micro),
                       output_processor=head, output_processor_context=request)
        if objective is None or not self.ranks.is_last_stage:
            return output, None
        layout = self.ranks.layout
        return output, partial(schedule_loss, objective=objective(index, micro), num_microbatches=num_microbatches,
                               dp_cp_size=layout.dp * layout.cp)

    def _padding_mask(self, micro: MicroBatch) -> Tensor | None:
        """[1, T] True at padding, for the load-balancing loss only; later stages want their sequence-parallel part."""
        if not self._aux_loss:
            return None
        lengths = np.diff(micro.cu_seqlens)
        mask = self._tensor(np.repeat(micro.sample_indices < 0, lengths))[None]
        if self.gpt.config.sequence_parallel and not self.gpt.pre_process:
            layout = self.ranks.layout
            mask = mask.chunk(layout.tp, 1)[layout.dense_coordinate(self.ranks.rank)["tp"]].contiguous()
        return mask

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # ------------------------------------------------------------------ statistics
    def _collect(self, micro_batches: Sequence[MicroBatch],
                 outputs: list[dict[str, Tensor]]) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
        """Statistics of the last stage's ranks (one per data-parallel rank) on rank 0; empty elsewhere."""
        sums: dict[str, float] = {}
        per_sample: dict[str, dict[int, float]] = {}
        coordinate = self.ranks.layout.dense_coordinate(self.ranks.rank)
        if self.ranks.is_last_stage and coordinate["tp"] == 0 and coordinate["cp"] == 0:
            for micro, statistics in zip(micro_batches, outputs, strict=True):
                for key, value in statistics.items():
                    if value.ndim == 0:
                        sums[key] = sums.get(key, 0.0) + value.item()
                    else:
                        pairs = zip(micro.sample_indices.tolist(), value.tolist(), strict=True)
                        per_sample.setdefault(key, {}).update({i: v for i, v in pairs if i >= 0})
        gathered = self.ranks.gather((sums, per_sample))
        if gathered is None:
            return {}, {}
        total: dict[str, float] = {}
        samples: dict[str, dict[int, float]] = {}
        for part_sums, part_samples in gathered:
            for key, amount in part_sums.items():
                total[key] = total.get(key, 0.0) + amount
            for key, values in part_samples.items():
                samples.setdefault(key, {}).update(values)
        return total, samples
