"""The project's own loss stage on the inputs of tests/loss_inputs.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from luspo_megatron.algorithm.objectives import policy_objective
from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs
from tests.loss_inputs import Inputs, Outcome, relative_error


def spread(values: Tensor, rows: Tensor) -> Tensor:
    """[R] -> [T], 0 elsewhere"""
    return values.new_zeros(rows.shape[0]).masked_scatter(rows, values)


def objective_of(inputs: Inputs, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    low, high = inputs.clip
    return policy_objective(
        "luspo", logprobs=logprobs, entropy=entropy, old_logprobs=inputs.old, ref_logprobs=inputs.ref,
        advantages=inputs.advantages, cu_seqlens=inputs.cu_seqlens, response_mask=inputs.mask, clip_low=low,
        clip_high=high, kl_coef=inputs.kl_coef, entropy_coef=inputs.entropy_coef,
        global_num_sequences=len(inputs.lengths), global_num_tokens=int(inputs.mask.sum()))


def fused(inputs: Inputs, **options: Any) -> Outcome:
    """In the dtype of `inputs.hidden` and `inputs.weight`."""
    hidden, weight = inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    settings = HeadOptions(inputs.vocab, inputs.temperature, **options)
    logprobs, entropy = token_logprobs(hidden, weight, inputs.targets, inputs.mask, settings)
    logprobs, entropy = spread(logprobs, inputs.mask), spread(entropy, inputs.mask)
    loss, statistics = objective_of(inputs, logprobs, entropy)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Outcome(loss.detach(), logprobs.detach(), entropy.detach(), hidden.grad, weight.grad,
                   int(statistics["clipped"].sum()))


def errors(got: Outcome, want: Outcome, mask: Tensor) -> dict[str, float]:
    """Of each quantity, relative to its largest element."""
    return {
        "loss": relative_error(got.loss, want.loss, 1e-3),
        "logprobs": relative_error(got.logprobs[mask], want.logprobs[mask], 1.0),
        "entropy": relative_error(got.entropy[mask], want.entropy[mask], 1.0),
        "d hidden": relative_error(got.grad_hidden, want.grad_hidden, 1e-3),
        "d weight": relative_error(got.grad_weight, want.grad_weight, 1e-3),
    }

