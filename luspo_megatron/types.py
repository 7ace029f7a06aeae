"""The data that travels between the stages of one step. Imports neither torch nor megatron.

Token positions: a packed micro-batch holds, for every sequence, prompt and response back to back. Position ``t``
predicts the token at ``t + 1`` *of the same sequence*; every per-token array of a micro-batch (targets, masks,
log-probs) is aligned with the predicting position. The last position of a sequence predicts nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized once. ``row`` is what the reward functions see: the data set's own columns."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that the engine's router chose, [num_tokens - 1, layers, topk] (the last token is never forwarded).

    ``data`` is the array's bytes in base64, so that it travels as JSON; ``dtype`` is the smallest that holds the ids.
    """

    shape: tuple[int, int, int]
    dtype: str
    data: str

    @classmethod
    def from_array(cls, experts: np.ndarray) -> RoutedExperts:
        largest = int(experts.max(initial=0))
        dtype = "uint8" if largest < 2**8 else "uint16" if largest < 2**16 else "int32"
        tokens, layers, topk = experts.shape
        return cls((tokens, layers, topk), dtype, base64.b64encode(experts.astype(dtype).tobytes()).decode())

    def array(self) -> np.ndarray:
        """[num_tokens - 1, layers, topk] int64."""
        return np.frombuffer(base64.b64decode(self.data), dtype=self.dtype).reshape(self.shape).astype(np.int64)


@dataclass
class Sample:
    """One response. Token ids are authoritative: text is for people and rewards, never tokenized again.

    ``weight_version_start`` and ``weight_version_end`` are the span of weight versions it was sampled under
    (equal unless the weights changed in flight).
    """

    group_id: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: FinishReason
    weight_version_start: int
    weight_version_end: int
    response_text: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    routed_experts: RoutedExperts | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class Group:
    """All samples of one prompt in one rollout. ``group_id`` counts up over the whole run, never reused."""

    group_id: int
    prompt: Prompt
    samples: list[Sample]


@dataclass
class MicroBatch:
    """Packed (thd) sequences of one data-parallel rank, [T] tokens in [n_seq] sequences, numpy arrays.

    ``cu_seqlens[-1] == T``. Padding (to a multiple of what TP and CP need) is one more sequence at the end with an
    all-False mask and ``sample_indices == -1``. A filler micro-batch has only that sequence.
    """

    token_ids: np.ndarray  # [T] int64
    targets: np.ndarray  # [T] int64, next token of the same sequence; 0 where there is none
    cu_seqlens: np.ndarray  # [n_seq + 1] int32
    response_mask: np.ndarray  # [T] bool, True where the target was sampled by the policy
    sample_indices: np.ndarray  # [n_seq] int64, index into the step's sample list; -1 for padding
    rollout_logprobs: np.ndarray  # [T] float32, 0 outside the mask

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.sample_indices.shape[0])


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's share of one data-parallel rank, with the global denominators.

    ``global_num_sequences`` counts every sequence of the mini-batch over all data-parallel ranks, empty and masked
    ones included, padding not; ``global_num_tokens`` counts response tokens the same way.
    """

    micro_batches: Sequence[MicroBatch]
    global_num_sequences: int
    global_num_tokens: int
