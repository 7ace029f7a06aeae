"""The rollout digest tells any two rollouts apart that differ in a token, in order, or in where the response begins."""

from __future__ import annotations

import dataclasses

from luspo_megatron.step import rollout_digest
from tests.tiny import samples_of


def test_digest() -> None:
    samples = samples_of(seed=4)
    digest = rollout_digest(samples)
    assert digest == rollout_digest(samples_of(seed=4)) and 2**32 < digest < 2**48 and float(digest) == digest
    first = samples[0]
    changed = dataclasses.replace(first, response_ids=[*first.response_ids[:-1], first.response_ids[-1] + 1])
    moved = dataclasses.replace(first, prompt_ids=[*first.prompt_ids, first.response_ids[0]],
                                response_ids=first.response_ids[1:])
    others = [[changed, *samples[1:]], [moved, *samples[1:]], [*samples[1:], first], samples[:-1]]
    assert len({digest, *map(rollout_digest, others)}) == 5
