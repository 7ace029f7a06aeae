"""ConstantRewardWatch: says loudly that nothing can be learned when every reward is the same, step after step."""

from __future__ import annotations

from collections.abc import Sequence

_NOISE = 1e-9


class ConstantRewardWatch:
    """Feed it every step's rewards; after ``k`` steps in a row without any difference inside a step it warns.

    Equal rewards have advantage 0, so the policy does not move. It warns again after every further ``k`` such steps.
    """

    def __init__(self, k: int = 5) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        self.k = k
        self.constant_steps = 0

    def observe(self, rewards: Sequence[float]) -> str | None:
        """The warning's text when it is due, else None. A step of fewer than two rewards is skipped."""
        if len(rewards) < 2:
            return None
        if max(rewards) - min(rewards) > _NOISE:
            self.constant_steps = 0
            return None
        self.constant_steps += 1
        if self.constant_steps % self.k:
            return None
        return (
            f"WARNING: in each of the last {self.constant_steps} steps all rewards were equal (now {rewards[-1]:g}): "
            "every advantage is 0 and nothing is learned. Usual causes: reward.answer_pattern or the \\boxed{} form "
            "does not match what the model writes; data.answer_key names another column; responses are cut off by "
            "rollout.max_response_tokens; the task is too hard or too easy for this model. Run `luspo doctor` with the "
            "same flags: it grades the data set's own answers first."
        )
