"""Row arithmetic in torch: the CPU's backend, the reference of the Triton kernels, and float64 on any device.

The gradient of a chunk is a row factor times a matrix wherever no entropy gradient is asked: the factor then goes onto
[R, h] operands of the matrix products, and cached exponentials are multiplied as they are, without a pass over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luspo_megatron.kernels.head import Workspace
from luspo_megatron.kernels.rows import ChunkGradient, RowGradients, merge


def _owned(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(rows, columns) of the targets that lie in this chunk."""
    rows = ((column >= 0) & (column < columns)).nonzero()[:, 0]
    return rows, column[rows]


class TorchRows:
    def statistics(self, logits: Tensor, column: Tensor, inv_temperature: float, state: Tensor, exps: Tensor | None,
                   space: Workspace) -> Tensor | None:
        if inv_temperature != 1.0:
            logits.mul_(inv_temperature)
        rows, columns = logits.shape
        own = _owned(column, columns)
        target = torch.zeros_like(state[3])
        target[own[0]] = logits[own]
        peak = logits.amax(-1)
        shifted = logits.sub_(peak[:, None])
        kept = exps is not None and exps.dtype == shifted.dtype
        e = torch.exp(shifted, out=exps if kept else space.take(1, rows, columns, shifted.dtype))
        if exps is not None and not kept:
            exps.copy_(e)
        part = torch.stack([peak, e.sum(-1), torch.linalg.vecdot(e, shifted), target])
        state.copy_(merge(torch.stack([state, part])))
        return None if exps is None else peak

    def gradient(self, source: Tensor, reference: Tensor | None, column: Tensor, rows: RowGradients,
                 inv_temperature: float, dtype: torch.dtype, space: Workspace) -> ChunkGradient:
        own = _owned(column, source.shape[1])
        scale = rows.grad_logp * -inv_temperature
        if reference is None:
            matrix = source.mul_(inv_temperature) if inv_temperature != 1.0 else source
            matrix.sub_(rows.lse[:, None])
            if rows.with_entropy:
                return self._with_entropy(matrix, matrix.exp(), own, rows, inv_temperature, dtype)
            matrix.exp_()
        else:
            shift = reference[rows.index] - rows.lse
            if rows.index.shape[0] == source.shape[0]:
                matrix = source
            else:
                matrix = space.take(1, rows.index.shape[0], source.shape[1], source.dtype)
                torch.index_select(source, 0, rows.index, out=matrix)
            if rows.with_entropy:
                e = matrix.to(rows.lse.dtype)
                # log e is -inf where e underflowed; there p is 0 and so is the gradient
                logp = torch.where(e > 0, e.log() + shift[:, None], 0.0)
                return self._with_entropy(logp, e * shift.exp()[:, None], own, rows, inv_temperature, dtype)
            scale = scale * shift.exp()
        matrix[own] = 0
        return ChunkGradient(matrix.to(dtype), scale, complete=False)

    def _with_entropy(self, logp: Tensor, p: Tensor, own: tuple[Tensor, Tensor], rows: RowGradients,
                      inv_temperature: float, dtype: torch.dtype) -> ChunkGradient:
        """-p (grad_logp + grad_entropy (log p + H)) / temperature"""
        logp.add_(rows.entropy[:, None]).mul_(rows.grad_entropy[:, None]).add_(rows.grad_logp[:, None])
        matrix = logp.mul_(p).mul_(-inv_temperature)
        matrix[own] = rows.own[own[0]]
        return ChunkGradient(matrix.to(dtype), None, complete=True)
