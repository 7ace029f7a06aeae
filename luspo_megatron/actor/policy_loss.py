"""Binds the objective of the configuration to the tensors of one mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from luspo_megatron.actor.actor import MicroObjective
from luspo_megatron.actor.loss_stage import Objective
from luspo_megatron.algorithm.objectives import policy_objective, supervised_objective
from luspo_megatron.config import AlgorithmConfig
from luspo_megatron.data.collate import per_sequence
from luspo_megatron.types import MicroBatch, MiniBatch


def policy_loss(settings: AlgorithmConfig, mini_batch: MiniBatch, advantages: np.ndarray, *,
                old_logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor] | None = None,
                max_response_tokens: int) -> MicroObjective:
    """advantages [samples of the step]; old and reference log-probs [T] of each micro-batch, on its device."""

    def bind(index: int, micro: MicroBatch) -> Objective:
        old = old_logprobs[index]
        packed = {
            "old_logprobs": old,
            "advantages": torch.from_numpy(per_sequence(advantages, micro)).to(old),
            "cu_seqlens": torch.from_numpy(micro.cu_seqlens).to(old.device),
            "response_mask": torch.from_numpy(micro.response_mask).to(old.device),
            "ref_logprobs": None if ref_logprobs is None else ref_logprobs[index],
        }

        def objective(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return policy_objective(
                settings.objective, logprobs=logprobs, entropy=entropy, clip_low=settings.clip_low,
                clip_high=settings.clip_high, global_num_sequences=mini_batch.global_num_sequences,
                global_num_tokens=mini_batch.global_num_tokens, max_response_length=max_response_tokens,
                kl_coef=settings.kl_coef, entropy_coef=settings.entropy_coef, **packed)  # type: ignore[arg-type]

        return objective

    return bind


def supervised_loss(mini_batch: MiniBatch) -> MicroObjective:
    """Token-mean cross-entropy over the responses of the whole mini-batch."""

    def bind(index: int, micro: MicroBatch) -> Objective:
        def objective(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mask = torch.from_numpy(micro.response_mask).to(logprobs.device)
            return supervised_objective(logprobs, mask, mini_batch.global_num_tokens)

        return objective

    return bind
