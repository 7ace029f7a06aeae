"""The last pipeline stage: hidden states -> log-probs and entropy -> objective -> megatron's loss, scaled back.

`head` is GPTModel's output_processor hook: it takes the place of the output layer. `schedule_loss` is what
megatron's pipeline schedule calls with its output.

Loss scaling. megatron-core 0.19's schedule (pipeline_parallel/schedules.py, forward_step_calc_loss) divides a 3-tuple
loss by max(num_tokens, 1) and by num_microbatches; DDP then averages gradients over the data x context parallel ranks,
dense and expert parameters alike. An objective of ours already holds its global denominator, so that the mini-batch
loss is the plain sum over micro-batches and ranks. Hence the value handed over is

    objective * num_microbatches * dp_cp_size,  num_tokens = 1,

whose gradient after megatron's divisions is the sum of the objective's gradients, for any split. This is the only place
that undoes megatron's scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luspo_megatron.config import LossConfig
from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs

Objective = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [T], entropy [T]) -> (loss with its global denominator, summable statistics)"""


@dataclass(frozen=True)
class HeadRequest:
    """What `head` needs beside the hidden states."""

    targets: Tensor  # [T] int64
    rows: Tensor  # [T] bool, where log-probs are wanted
    vocab_size: int
    temperature: float
    loss: LossConfig


def head(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, config: Any, context: HeadRequest,
         **_: Any) -> Tensor:
    """GPTModel.output_processor: hidden_states [Ts, 1, h] -> [2, T], log-prob and entropy, 0 outside `rows`."""
    # The hook goes around output_layer.forward, whose pre-hooks wait for gathered parameters (overlap_param_gather).
    for hook in list(output_layer._forward_pre_hooks.values()):
        hook(output_layer, ())
    weight = output_layer.weight if output_weight is None else output_weight
    options = HeadOptions(vocab_size=context.vocab_size, temperature=context.temperature, group=output_layer.tp_group,
                          sequence_parallel=config.sequence_parallel, chunk_bytes=context.loss.chunk_bytes,
                          cache_bytes=context.loss.cache_bytes, backend=context.loss.backend)
    logprobs, entropy = token_logprobs(hidden_states.squeeze(1), weight, context.targets, context.rows, options)
    out = logprobs.new_zeros((2, context.targets.shape[0]))
    return out.masked_scatter(context.rows.expand(2, -1), torch.cat([logprobs, entropy]))


def schedule_loss(output: Tensor, *, objective: Objective, num_microbatches: int,
                  dp_cp_size: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """[2, T] -> (loss scaled for megatron, num_tokens = 1, statistics)."""
    loss, statistics = objective(output[0], output[1])
    # cloned because megatron divides the loss in place
    statistics = {"loss": loss.detach().clone(), **statistics}
    return loss * (num_microbatches * dp_cp_size), torch.ones((), dtype=torch.int, device=loss.device), statistics
