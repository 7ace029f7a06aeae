"""The exact push on the response length, through the project's own objective: no sampling, no training.

A policy that stops at every token with the same probability, and rewards that know nothing of the length: every
possible response (length, right or wrong, clipped or not) is handed to `policy_objective` with its probability folded
into its advantage, and autograd gives the slope of J in the stop logit. `analytic_length_drift` says in closed form
what must come out for LUSPO and GSPO.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from luspo_megatron.algorithm.objectives import policy_objective

TAIL = 1e-17  # responses longer than have this probability together are left out


def objective_drift(objective: str, p: float, accuracy: float, clip_positive: float, clip_negative: float) -> float:
    """dJ/d(stop logit) at ratio 1; positive: responses shrink.

    Arguments as in `analytic_length_drift`; ``p`` of 1/64 already makes 13 million tokens. For objectives averaged over
    sequences (luspo, gspo, grpo). Raises ValueError for others, whose denominators depend on the batch.
    """
    if objective not in ("luspo", "gspo", "grpo"):
        raise ValueError(f"objective {objective!r} is no mean over sequences")
    if not 0 < p < 1 or not 0 < accuracy < 1:
        raise ValueError("p and accuracy must lie inside (0, 1)")
    longest = math.ceil(math.log(TAIL) / math.log1p(-p))
    lengths = torch.arange(1, longest + 1).repeat(4)
    ends = lengths.cumsum(0)
    probability = p * (1 - p) ** (lengths.double() - 1)
    right, wrong = math.sqrt((1 - accuracy) / accuracy), -math.sqrt(accuracy / (1 - accuracy))
    kinds = torch.tensor([  # share of the responses, advantage, log ratio
        (accuracy * (1 - clip_positive), right, 0.0), (accuracy * clip_positive, right, math.log(1.5)),
        ((1 - accuracy) * (1 - clip_negative), wrong, 0.0), ((1 - accuracy) * clip_negative, wrong, math.log(0.5)),
    ], dtype=torch.float64).repeat_interleave(longest, 0)

    theta = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
    is_stop = torch.zeros(int(ends[-1]), dtype=torch.bool)
    is_stop[ends - 1] = True
    logprobs = torch.where(is_stop, F.logsigmoid(theta), F.logsigmoid(-theta))
    old = logprobs.detach() - kinds[:, 2].repeat_interleave(lengths)
    loss, _ = policy_objective(
        objective, logprobs=logprobs, old_logprobs=old, advantages=kinds[:, 0] * kinds[:, 1] * probability,
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]), response_mask=torch.ones_like(is_stop), clip_low=0.25,
        clip_high=0.25, global_num_sequences=1, global_num_tokens=int(ends[-1]))
    (slope,) = torch.autograd.grad(loss, theta)
    return -float(slope)
