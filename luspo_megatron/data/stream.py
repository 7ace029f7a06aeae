"""PromptStream: prompts dealt out in epochs, resumed at the exact position; and what two prompt sets share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from luspo_megatron.errors import UserError
from luspo_megatron.types import Prompt


class PromptStream:
    """An endless stream: every prompt once per epoch, in an order drawn from (seed, epoch).

    The state is the epoch and the position in it, so that n draws equal k draws, a resume, and n - k draws.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ValueError("a PromptStream needs at least one prompt")
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._fingerprint = fingerprint(prompts)
        self._order = self._epoch_order()

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; the list goes on into the next epoch where this one ends."""
        out: list[Prompt] = []
        while len(out) < n:
            if self.position == len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            taken = self._order[self.position : self.position + n - len(out)]
            out += [self.prompts[i] for i in taken]
            self.position += len(taken)
        return out

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises UserError when the prompts, the seed or the shuffling differ now."""
        now = self.state()
        for key in ("prompts", "fingerprint", "seed", "shuffle"):
            if state[key] != now[key]:
                raise UserError(
                    f"the checkpoint's data position belongs to other data: {key} was {state[key]}, now it is "
                    f"{now[key]}; use the same data.* and run.seed as before, or a new run.dir"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        count = len(self.prompts)
        if not self.shuffle:
            return list(range(count))
        order: list[int] = np.random.default_rng([self.seed, self.epoch]).permutation(count).tolist()
        return order


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of the prompts' ids and order (prompt_id holds a digest of each one's content)."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(prompt.prompt_id.encode() + b"\n")
    return digest.hexdigest()


def overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> tuple[list[Prompt], int]:
    """(training prompts that are not in the evaluation, number of those that were), compared by token ids."""
    held_out = {prompt.prompt_ids for prompt in evaluation}
    kept = [prompt for prompt in train if prompt.prompt_ids not in held_out]
    return kept, len(train) - len(kept)
