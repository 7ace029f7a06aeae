"""Masked per-sequence sums over packed [T] tensors: what every objective is made of.

All arithmetic is float64: these vectors are [T] while the stage before handles [T, vocabulary], so it costs nothing,
and the clip range of sequence ratios (2e-3) is not far above the float32 noise of long sums.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Shapes: T packed tokens, n_seq sequences. Padding and empty sequences are part of n_seq.
PerToken = Float[Tensor, "T"]
PerSequence = Float[Tensor, "n_seq"]
TokenMask = Bool[Tensor, "T"]
CuSeqlens = Int[Tensor, "n_seq+1"]
Scalar = Float[Tensor, ""]


def zero_where_not(mask: Tensor, values: Tensor) -> Tensor:
    """float64 values, exactly 0 outside the mask: a select, since 0 * NaN and 0 * inf are NaN, in gradients too."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).double()


class Packed:
    """The sequences of a pack and the tokens in them that count.

    ``counts`` [n_seq] are the counted tokens n_i, ``at_least_one`` the same as a divisor, ``present`` is n_i > 0.
    Sums are per segment, not differences of a running sum (those lose the digits of short sequences late in a long
    pack), and without atomics, so a run repeats bitwise. Raises ValueError when cu_seqlens does not span T.
    """

    def __init__(self, cu_seqlens: CuSeqlens, response_mask: TokenMask) -> None:
        self.num_tokens = response_mask.shape[0]
        self.segment_lengths = cu_seqlens.diff().long()
        if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != self.num_tokens or bool((self.segment_lengths < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to the {self.num_tokens} tokens that are passed")
        self.mask = response_mask.bool()
        self.counts = self.sum(self.mask.double())
        self.at_least_one = self.counts.clamp(min=1)
        self.present = self.counts > 0

    def at(self, values: PerToken) -> PerToken:
        """float64, 0 outside the mask whatever was there."""
        return zero_where_not(self.mask, values)

    def sum(self, values: PerToken) -> PerSequence:
        # unsafe only skips the checks made above; initial gives empty segments a 0
        return torch.segment_reduce(values, "sum", lengths=self.segment_lengths, initial=0.0, unsafe=True)

    def mean(self, values: PerToken) -> PerSequence:
        """Mean over the counted tokens of values that are 0 elsewhere; 0 for a sequence without any."""
        return self.sum(values) / self.at_least_one

    def spread(self, values: PerSequence) -> PerToken:
        """Each sequence's value at each of its counted tokens, 0 elsewhere."""
        return self.at(torch.repeat_interleave(values, self.segment_lengths, output_size=self.num_tokens))
