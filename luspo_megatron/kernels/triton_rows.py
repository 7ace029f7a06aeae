"""Row arithmetic in Triton for CUDA: two kernels that read each logit once, around cuBLAS products.

The kernels are memory-bound; fused product-and-softmax kernels were passed over because they reach about half the rate
of cuBLAS on the three products that are nearly all of the time. Sizes come from a fixed table (no autotuning: results
repeat, and triton's interpreter runs the same code). benchmarks/kernel_report.py compiles every kernel for every
supported architecture without a GPU. Left out: float64 (torch_rows).

Layout: all matrices are row-major and contiguous; offsets are 64 bit, since R * C passes 2^31.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luspo_megatron.kernels.head import Workspace
from luspo_megatron.kernels.rows import ChunkGradient, RowGradients

STATISTICS_BLOCK, STATISTICS_WARPS = 2048, 4
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4

# rows of the [6, R] tensor that gradient_kernel reads
_LSE, _SHIFT, _GRAD_LOGP, _GRAD_ENTROPY, _ENTROPY, _OWN = range(6)


@triton.jit
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, C] float32, read: x * temperature
    column_ptr,  # [R] int64, read: column of the target, may lie outside 0 .. C - 1
    state_ptr,  # [4, R] float32, read and written: peak, total, weighted, target over the columns so far
    exps_ptr,  # [R, C] float32 or bfloat16, written if KEEP: e^(x - reference)
    reference_ptr,  # [R] float32, written if KEEP: maximum of this chunk
    num_rows,
    num_columns,
    inv_temperature,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. The second loop, for the cache, finds the row in the caches of the multiprocessor."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_columns
    lanes = tl.arange(0, BLOCK)
    peak, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, num_columns, BLOCK):
        inside = start + lanes < num_columns
        x = tl.load(logits_ptr + start + lanes, mask=inside, other=float("-inf")) * inv_temperature
        top = tl.maximum(peak, tl.max(x, 0))
        scale = tl.exp(peak - top)
        # selects, not products: outside the row x is -inf, and before the first block so is peak
        moved = tl.where(total > 0, total * (peak - top), 0.0)
        e = tl.where(inside, tl.exp(x - top), 0.0)
        weighted = (weighted + moved) * scale + tl.sum(tl.where(inside, e * (x - top), 0.0), 0)
        total = total * scale + tl.sum(e, 0)
        peak = top

    column = tl.load(column_ptr + row)
    owned = (column >= 0) & (column < num_columns)
    target = tl.load(logits_ptr + column, mask=owned, other=0.0) * inv_temperature

    old_peak, old_total = tl.load(state_ptr + row), tl.load(state_ptr + num_rows + row)
    old_weighted, old_target = tl.load(state_ptr + 2 * num_rows + row), tl.load(state_ptr + 3 * num_rows + row)
    top = tl.maximum(old_peak, peak)
    old_scale, scale = tl.exp(old_peak - top), tl.exp(peak - top)
    old_moved = tl.where(old_total > 0, old_total * (old_peak - top), 0.0)
    tl.store(state_ptr + row, top)
    tl.store(state_ptr + num_rows + row, old_total * old_scale + total * scale)
    tl.store(state_ptr + 2 * num_rows + row,
             (old_weighted + old_moved) * old_scale + (weighted + total * (peak - top)) * scale)
    tl.store(state_ptr + 3 * num_rows + row, old_target + target)

    if KEEP:
        tl.store(reference_ptr + row, peak)
        exps_ptr += row * num_columns
        for start in range(0, num_columns, BLOCK):
            inside = start + lanes < num_columns
            x = tl.load(logits_ptr + start + lanes, mask=inside, other=float("-inf")) * inv_temperature
            tl.store(exps_ptr + start + lanes, tl.exp(x - peak).to(exps_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    source_ptr,  # [N, C], read: float32 logits (x * temperature), or with CACHED exponentials in the weight's dtype
    index_ptr,  # [R] int64, read with CACHED: row of `source` of each active row
    column_ptr,  # [R] int64, read: column of the target, may lie outside 0 .. C - 1
    vectors_ptr,  # [6, R] float32, read: lse, reference - lse, grad_logp, grad_entropy, entropy, own
    out_ptr,  # [R, C] float32 or bfloat16, written: d loss / d logits
    num_rows,
    num_columns,
    inv_temperature,
    CACHED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per active row and block of columns: -p (grad_logp + grad_entropy (log p + H)) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    if CACHED:
        source_row = tl.load(index_ptr + row)
        shift = tl.load(vectors_ptr + num_rows + row)
        e = tl.load(source_ptr + source_row * num_columns + at, mask=inside, other=0.0).to(tl.float32)
        p = e * tl.exp(shift)
        # where e underflowed to 0, p is 0 and so is the gradient; log e would be -inf
        logp = tl.log(tl.where(e > 0, e, 1.0)) + shift
    else:
        lse = tl.load(vectors_ptr + row)
        x = tl.load(source_ptr + row * num_columns + at, mask=inside, other=float("-inf"))
        logp = x * inv_temperature - lse
        p = tl.exp(logp)
    factor = tl.load(vectors_ptr + 2 * num_rows + row)
    if ENTROPY:
        grad_entropy = tl.load(vectors_ptr + 3 * num_rows + row)
        entropy = tl.load(vectors_ptr + 4 * num_rows + row)
        factor += tl.where(p > 0, grad_entropy * (logp + entropy), 0.0)
    own = tl.load(vectors_ptr + 5 * num_rows + row)
    g = tl.where(at == tl.load(column_ptr + row), own, -p * factor * inv_temperature)
    tl.store(out_ptr + row * num_columns + at, g.to(out_ptr.dtype.element_ty), mask=inside)


class TritonRows:
    def statistics(self, logits: Tensor, column: Tensor, inv_temperature: float, state: Tensor, exps: Tensor | None,
                   space: Workspace) -> Tensor | None:
        rows, columns = logits.shape
        reference = None if exps is None else torch.empty_like(state[0])
        if rows:
            statistics_kernel[(rows,)](
                logits, column, state, logits if exps is None else exps, state if reference is None else reference,
                rows, columns, inv_temperature, KEEP=exps is not None, BLOCK=STATISTICS_BLOCK,
                num_warps=STATISTICS_WARPS)
        return reference

    def gradient(self, source: Tensor, reference: Tensor | None, column: Tensor, rows: RowGradients,
                 inv_temperature: float, dtype: torch.dtype, space: Workspace) -> ChunkGradient:
        count, columns = rows.index.shape[0], source.shape[1]
        shift = rows.lse if reference is None else reference[rows.index] - rows.lse
        vectors = torch.stack([rows.lse, shift, rows.grad_logp, rows.grad_entropy, rows.entropy, rows.own])
        out = space.take(1, count, columns, dtype)
        grid: Any = (count, triton.cdiv(columns, GRADIENT_BLOCK))
        if count:
            gradient_kernel[grid](
                source, rows.index, column, vectors, out, count, columns, inv_temperature,
                CACHED=reference is not None, ENTROPY=rows.with_entropy, BLOCK=GRADIENT_BLOCK,
                num_warps=GRADIENT_WARPS)
        return ChunkGradient(out, None, complete=True)
