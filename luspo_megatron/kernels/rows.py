"""The contract of the row backends, and the choice of one.

A backend does the arithmetic on one [R, C] chunk of logits: `statistics` in the forward, `gradient` in the backward.
Everything around it (matrix products, chunks, collectives, the cache's budget) is the same for all of them.

    statistics of row t over the columns seen so far, x = logits / temperature:
        peak = max x    total = sum e^(x - peak)    weighted = sum e^(x - peak) (x - peak)    target = x[target]
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from luspo_megatron.errors import UserError
from luspo_megatron.kernels.head import HeadOptions, Workspace


@dataclass(frozen=True)
class RowGradients:
    """What `gradient` needs of the R active rows; all [R], float32 or float64.

    index: their places among the rows of the forward. own: gradient of the target's logit, which the backend must not
    compute from p (1 - p loses its digits where p is near 1). base: -grad_logp / temperature. with_entropy: whether
    grad_entropy holds anything but 0.
    """

    index: Int[Tensor, " R"]
    lse: Float[Tensor, " R"]
    entropy: Float[Tensor, " R"]
    grad_logp: Float[Tensor, " R"]
    grad_entropy: Float[Tensor, " R"]
    own: Float[Tensor, " R"]
    base: Float[Tensor, " R"]
    with_entropy: bool


@dataclass(frozen=True)
class ChunkGradient:
    """d loss / d logits of a chunk: `matrix` itself if `complete`. Else base * factor (1 if None) * matrix, row by row,
    without the targets' own entries, which are 0 in `matrix` and are added by the caller."""

    matrix: Float[Tensor, "R C"]
    factor: Float[Tensor, " R"] | None
    complete: bool


class Rows(Protocol):
    """logits hold x * temperature, [R, C] contiguous, and may be overwritten; `column` [R] int64 is the target's column
    and may lie outside 0 .. C - 1."""

    def statistics(self, logits: Float[Tensor, "R C"], column: Int[Tensor, " R"], inv_temperature: float,
                   state: Float[Tensor, "4 R"], exps: Float[Tensor, "R C"] | None, space: Workspace) -> Tensor | None:
        """Folds a chunk into `state` (peak, total, weighted, target). With `exps`, writes e^(x - reference) there and
        returns reference [R], the chunk's own maximum."""

    def gradient(self, source: Float[Tensor, "N C"], reference: Float[Tensor, " N"] | None, column: Int[Tensor, " R"],
                 rows: RowGradients, inv_temperature: float, dtype: torch.dtype, space: Workspace) -> ChunkGradient:
        """From recomputed logits (N = R, reference None) or from the cache of all N rows of the forward."""


def merge(parts: Float[Tensor, "n 4 R"]) -> Float[Tensor, "4 R"]:
    """Statistics of n disjoint sets of columns -> of their union. A set may be empty (peak -inf, the rest 0)."""
    peak, total, weighted, target = parts.unbind(1)
    top = peak.amax(0)
    shift = peak - top  # -inf for an empty set
    scale = shift.exp()
    moved = torch.where(total > 0, total * shift, 0.0)
    return torch.stack([top, (total * scale).sum(0), ((weighted + moved) * scale).sum(0), target.sum(0)])


def triton_usable(device: torch.device) -> bool:
    """On CUDA with triton installed, or anywhere in triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def row_backend(options: HeadOptions, weight: Tensor) -> Rows:
    """auto: triton on CUDA where installed, else torch; float64 is torch's. UserError for triton without CUDA."""
    usable = triton_usable(weight.device)
    if options.backend == "triton" and not usable:
        raise UserError(f"loss.backend=triton: triton needs a CUDA device and the triton package, and the head is on "
                        f"{weight.device}; take auto or torch")
    fast = options.backend == "triton" or (options.backend == "auto" and usable and weight.is_cuda)
    if fast and weight.dtype != torch.float64:
        from luspo_megatron.kernels.triton_rows import TritonRows

        return TritonRows()
    from luspo_megatron.kernels.torch_rows import TorchRows

    return TorchRows()
