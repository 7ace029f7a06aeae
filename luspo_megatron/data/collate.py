"""Packing: samples to one flat micro-batch, and per-token results back to samples. numpy only.

A packed micro-batch holds prompt and response of every sample back to back, nothing between. Targets shift inside
each sequence: the last position of a sequence predicts nothing, and no label crosses into the next sample. The
response mask follows from lengths, never from the pad id, since a response may hold that id. Left out: the padding of
each sequence that context parallelism needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from luspo_megatron.errors import UserError
from luspo_megatron.types import MicroBatch

PAD_ID = 0
"""Any id that the embedding has; padding is masked by position."""


class SampleLike(Protocol):
    """What packing reads of a sample. ``rollout_logprobs`` has one entry per response token."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def rollout_logprobs(self) -> Sequence[float]: ...


def pack(samples: Sequence[SampleLike], indices: Sequence[int], multiple: int = 1) -> MicroBatch:
    """Packs ``samples[i] for i in indices``, in this order, into one MicroBatch whose T is a multiple of ``multiple``.

    ``samples`` is the step's whole list, so that ``sample_indices`` says where each sequence came from. Without
    indices the result is a filler of ``multiple`` padding tokens. Raises UserError for an empty prompt (nothing would
    predict the first response token) and ValueError where log-probs and response differ in length.
    """
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}, it must be at least 1")
    ids: list[int] = []
    targets: list[int] = []
    mask: list[bool] = []
    rollout: list[float] = []
    cu_seqlens = [0]
    for index in indices:
        sample = samples[index]
        prompt, response = list(sample.prompt_ids), list(sample.response_ids)
        if not prompt:
            raise UserError(f"sample {index}: the prompt has no tokens; give it text or a chat template")
        if len(sample.rollout_logprobs) != len(response):
            raise ValueError(
                f"sample {index}: {len(response)} response tokens but {len(sample.rollout_logprobs)} rollout log-probs"
            )
        tokens = prompt + response
        before = len(prompt) - 1  # positions that predict prompt tokens
        ids += tokens
        targets += [*tokens[1:], 0]
        mask += [False] * before + [True] * len(response) + [False]
        rollout += [0.0] * before + [float(x) for x in sample.rollout_logprobs] + [0.0]
        cu_seqlens.append(len(ids))
    sample_indices = list(indices)
    padding = -len(ids) % multiple or (0 if ids else multiple)
    if padding:
        ids += [PAD_ID] * padding
        targets += [0] * padding
        mask += [False] * padding
        rollout += [0.0] * padding
        cu_seqlens.append(len(ids))
        sample_indices.append(-1)
    return MicroBatch(
        token_ids=np.asarray(ids, np.int64),
        targets=np.asarray(targets, np.int64),
        cu_seqlens=np.asarray(cu_seqlens, np.int32),
        response_mask=np.asarray(mask, bool),
        sample_indices=np.asarray(sample_indices, np.int64),
        rollout_logprobs=np.asarray(rollout, np.float32),
    )


def filler(multiple: int = 1) -> MicroBatch:
    """A micro-batch of padding only, for ranks that have fewer samples than others."""
    return pack([], [], multiple)


def _response_positions(micro_batch: MicroBatch) -> list[tuple[int, NDArray[np.int64]]]:
    """(sample index, positions in the pack that predict its response), padding left out, in pack order."""
    out = []
    for i, index in enumerate(micro_batch.sample_indices):
        if index >= 0:
            start, end = int(micro_batch.cu_seqlens[i]), int(micro_batch.cu_seqlens[i + 1])
            out.append((int(index), start + np.flatnonzero(micro_batch.response_mask[start:end])))
    return out


def unpack(values: ArrayLike, micro_batch: MicroBatch) -> list[NDArray[Any]]:
    """Per-token values [T] to one array per sample, in response order (entry k belongs to ``response_ids[k]``).

    The arrays follow ``micro_batch.sample_indices`` without its padding.
    """
    array = np.asarray(values)
    if array.shape != (micro_batch.num_tokens,):
        raise ValueError(f"values have shape {array.shape}, the micro-batch has {micro_batch.num_tokens} tokens")
    return [array[positions] for _, positions in _response_positions(micro_batch)]


def scatter(values: Sequence[ArrayLike], micro_batch: MicroBatch, dtype: Any = np.float32) -> NDArray[Any]:
    """The inverse of `unpack`: per-sample response vectors (indexed by sample index) to [T], 0 outside the mask."""
    out = np.zeros(micro_batch.num_tokens, dtype)
    for index, positions in _response_positions(micro_batch):
        vector = np.asarray(values[index], dtype)
        if vector.shape != positions.shape:
            raise ValueError(f"sample {index}: {vector.shape} values for {positions.shape[0]} response tokens")
        out[positions] = vector
    return out


def per_sequence(values: ArrayLike, micro_batch: MicroBatch, dtype: Any = np.float64) -> NDArray[Any]:
    """Per-sample scalars (indexed by sample index), such as advantages, to [n_seq]; 0 for padding."""
    array = np.asarray(values, dtype)
    out = np.zeros(micro_batch.num_sequences, dtype)
    real = micro_batch.sample_indices >= 0
    out[real] = array[micro_batch.sample_indices[real]]
    return out
