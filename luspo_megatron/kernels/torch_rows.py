"""Row arithmetic in torch: the CPU's backend, the reference of the Triton kernels, and float64 on any device.

The gradient of a chunk is a row factor times a matrix wherever no entropy gradient is asked: the factor then goes onto
[R, h] operands of the matrix products, and cached exponentials are multiplied as they are, without a pass over them.
On the CPU a chunk is handled in blocks of rows that stay in the processor's caches between the passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from luspo_megatron.kernels.head import BLOCK_BYTES, Workspace
from luspo_megatron.kernels.rows import ChunkGradient, RowGradients, merge

LOG_ZERO = -1e4
"""Stands for log 0 = -inf where a cached exponential underflowed: its exponential is 0 too, but 0 times it is 0."""


def _owned(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(rows, columns) of the targets that lie in this chunk."""
    rows = ((column >= 0) & (column < columns)).nonzero()[:, 0]
    return rows, column[rows]


def _blocks(matrix: Tensor) -> Iterator[slice]:
    """The rows, a few at a time on the CPU, whose caches then hold them from one pass to the next."""
    rows, columns = matrix.shape
    step = rows if matrix.is_cuda else max(1, BLOCK_BYTES // (columns * matrix.element_size()))
    for start in range(0, rows, max(1, step)):
        yield slice(start, start + step)


class TorchRows:
    def statistics(self, logits: Tensor, column: Tensor, inv_temperature: float, state: Tensor, exps: Tensor | None,
                   space: Workspace) -> Tensor | None:
        own = _owned(column, logits.shape[1])
        part = torch.zeros_like(state)
        peak, total, weighted, target = part
        target[own[0]] = logits[own] * inv_temperature
        for block in _blocks(logits):
            x = logits[block]
            if inv_temperature != 1.0:
                x.mul_(inv_temperature)
            torch.amax(x, -1, out=peak[block])
            x.sub_(peak[block, None])
            kept = exps is not None and exps.dtype == x.dtype
            place = exps[block] if exps is not None and kept else space.take(1, x.shape[0], x.shape[1], x.dtype)
            e = torch.exp(x, out=place)
            if exps is not None and not kept:
                exps[block].copy_(e)
            torch.sum(e, -1, out=total[block])
            torch.sum(x.mul_(e), -1, out=weighted[block])
        state.copy_(merge(torch.stack([state, part])))
        return None if exps is None else peak

    def gradient(self, source: Tensor, reference: Tensor | None, column: Tensor, rows: RowGradients,
                 inv_temperature: float, dtype: torch.dtype, space: Workspace) -> ChunkGradient:
        own = _owned(column, source.shape[1])
        matrix, factor = source, None
        if reference is None:
            for block in _blocks(matrix):
                x = matrix[block]
                if inv_temperature != 1.0:
                    x.mul_(inv_temperature)
                x.sub_(rows.lse[block, None])
                if not rows.with_entropy:
                    x.exp_()
        else:
            shift = reference[rows.index] - rows.lse
            if rows.index.shape[0] < source.shape[0]:
                matrix = space.take(1, rows.index.shape[0], source.shape[1], source.dtype)
                torch.index_select(source, 0, rows.index, out=matrix)
            if rows.with_entropy:
                matrix = matrix.to(rows.lse.dtype)
                for block in _blocks(matrix):
                    e = matrix[block]
                    e.log_().add_(shift[block, None]).clamp_(min=LOG_ZERO)
            factor = shift.exp()
        if rows.with_entropy:
            self._with_entropy(matrix, rows, inv_temperature, space)
            matrix[own] = rows.own[own[0]]
            return ChunkGradient(matrix.to(dtype), None, complete=True)
        matrix[own] = 0
        return ChunkGradient(matrix.to(dtype), factor, complete=False)

    def _with_entropy(self, logp: Tensor, rows: RowGradients, inv_temperature: float, space: Workspace) -> None:
        """log p -> -p (grad_logp + grad_entropy (log p + H)) / temperature, in place."""
        for block in _blocks(logp):
            x = logp[block]
            p = torch.exp(x, out=space.take(2, x.shape[0], x.shape[1], x.dtype))
            x.add_(rows.entropy[block, None]).mul_(rows.grad_entropy[block, None]).add_(rows.grad_logp[block, None])
            x.mul_(p).mul_(-inv_temperature)
