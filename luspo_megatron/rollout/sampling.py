"""From prompts to generate requests and back to samples: pure functions, so that a resumed run samples the same.

Seeds come from a hash of what the sample is (run seed, purpose, step, prompt index, sample index), never from a
generator that has a state; requests are cut in order, always at the same places.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from luspo_megatron.rollout.engine import GenerateRequest
from luspo_megatron.types import Group, Prompt, Sample


def sample_seed(run_seed: int, purpose: str, step: int, prompt_index: int, sample_index: int) -> int:
    """A 63-bit seed. ``purpose``: "rollout" or an evaluation's; ``step``: rollout id or evaluation seed."""
    key = json.dumps([run_seed, purpose, step, prompt_index, sample_index])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True)
class SamplingPlan:
    """What a step or an evaluation asks of the engines. ``seed``/``purpose``/``step``: see ``sample_seed``."""

    purpose: str
    run_seed: int
    step: int
    samples: int
    temperature: float
    top_p: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    batch_size: int

    def chunks(self, prompts: Sequence[Prompt], first_index: int = 0
               ) -> Iterator[tuple[list[tuple[int, int]], GenerateRequest]]:
        """((position in ``prompts``, sample index) of each sequence, request), at most batch_size sequences each.

        ``first_index``: the step's index of ``prompts[0]`` (later rounds of dynamic sampling go on counting).
        """
        wanted = [(p, s) for p in range(len(prompts)) for s in range(self.samples)]
        for start in range(0, len(wanted), self.batch_size):
            part = wanted[start : start + self.batch_size]
            yield part, GenerateRequest(
                prompts=[list(prompts[p].prompt_ids) for p, _ in part],
                seeds=[sample_seed(self.run_seed, self.purpose, self.step, first_index + p, s) for p, s in part],
                temperature=self.temperature,
                top_p=self.top_p,
                max_response_tokens=self.max_response_tokens,
                stop_token_ids=list(self.stop_token_ids),
            )


def all_equal(group: Group) -> bool:
    """True when no advantage can come of the group."""
    rewards = [sample.reward for sample in group.samples]
    return max(rewards) == min(rewards)


def pass_rates(per_prompt: Sequence[Sequence[bool]]) -> dict[str, float]:
    """pass@1 (mean over prompts of the share correct), its standard error over prompts, and pass@k with k samples.

    ``per_prompt``: for each prompt, whether each of its k samples is correct; k is the same for all.
    """
    shares = [fmean(flags) for flags in per_prompt]
    error = stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else 0.0
    return {"pass_at_1": fmean(shares), "pass_at_1_se": error,
            "pass_at_k": fmean([float(any(flags)) for flags in per_prompt])}


def mean_length(samples: Sequence[Sample]) -> float:
    """Mean response length in tokens, the stop token included."""
    return fmean([len(sample.response_ids) for sample in samples])
