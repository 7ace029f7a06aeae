"""Log-probs and entropy of given tokens from hidden states and a vocabulary-parallel head, without [T, V] logits.

One autograd function serves training, old and reference log-probs. The objective lives on the resulting [R] vectors, so
it needs no second pass over the vocabulary. With x = hidden @ weight.T / temperature, p = softmax(x):

    logp = x[target] - lse          H = lse - sum p x
    d logp / d x_v = 1[v = target] - p_v        d H / d x_v = -p_v (x_v - lse + H)

Each tensor-parallel rank sums over its own vocabulary rows; one all-gather of four numbers per token joins them (M, the
maximum; L = sum e^(x-M); E = sum e^(x-M) x; Z = the target's logit). Statistics are float32 (float64 for float64
input): with bfloat16 logits the noise of the sequence-mean log-ratio is as large as LUSPO's clip range. The vocabulary
is cut into chunks sized by a memory budget, forward and backward; the backward recomputes the logits. Rows whose
incoming gradients are zero (clipped, zero advantage) take no part in the backward.

This is the torch backend (CPU, and CUDA through cuBLAS). Triton kernels and an exp cache are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class HeadOptions:
    """What one loss-stage call needs beside tensors. `vocab_size` is the true one, without padding rows."""

    vocab_size: int
    temperature: float = 1.0
    group: dist.ProcessGroup | None = None  # tensor parallel
    sequence_parallel: bool = False
    chunk_bytes: int = 64 * 2**20

    @property
    def tp(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


def token_logprobs(hidden: Float[Tensor, "Ts h"], weight: Float[Tensor, "Vt h"], targets: Int[Tensor, " T"],
                   rows: Bool[Tensor, " T"], options: HeadOptions) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-prob of the target and entropy at the R rows where `rows` is True, the same on every tensor-parallel rank.

    Ts = T / tp under sequence parallelism, else T; Vt = padded vocabulary / tp. Gradients: hidden (summed over the
    vocabulary ranks, reduce-scattered under sequence parallelism) and weight (added to `weight.main_grad` in place
    where megatron's DDP has made one, else returned).
    """
    return _TokenLogprobs.apply(hidden, weight, targets, rows, options)  # type: ignore[no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor,
                options: HeadOptions) -> tuple[Tensor, Tensor]:
        row_index = rows.nonzero()[:, 0]  # [R]
        x = _gather_rows(hidden, options)[row_index]  # [R, h]
        y = targets[row_index]
        statistics = _local_statistics(x, weight, y, options)
        lse, logprobs, entropy = _merge(statistics, options)
        ctx.save_for_backward(hidden, weight, y, row_index, lse, entropy)
        ctx.options, ctx.parameter, ctx.num_rows = options, weight, rows.shape[0]
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, y, row_index, lse, entropy = ctx.saved_tensors
        options: HeadOptions = ctx.options
        grad_logp, grad_entropy = grads[0].to(lse.dtype), grads[1].to(lse.dtype)
        active = ((grad_logp != 0) | (grad_entropy != 0)).nonzero()[:, 0]
        row_index, y, lse, entropy = row_index[active], y[active], lse[active], entropy[active]
        grad_logp, grad_entropy = grad_logp[active, None], grad_entropy[active, None]
        x = _gather_rows(hidden, options)[row_index]
        head = _HeadGradient(ctx.parameter, ctx.needs_input_grad[1])
        grad_x = torch.zeros(x.shape, dtype=lse.dtype, device=x.device)
        for chunk in _chunks(weight, x.shape[0], options):
            logits = _logits(x, weight, chunk, options, lse.dtype)
            d = logits.sub_(lse[:, None])  # log p
            p = d.exp()
            # grad of the scaled logits; the entropy term is finite because padding columns are never computed
            g = d.add_(entropy[:, None]).mul_(p).mul_(-grad_entropy)
            g.sub_(p.mul_(grad_logp))
            own = ((y >= chunk.first) & (y < chunk.first + chunk.size)).nonzero()[:, 0]
            g[own, y[own] - chunk.first] += grad_logp[own, 0]
            g = g.div_(options.temperature).to(weight.dtype)
            grad_x += g @ weight[chunk.start : chunk.start + chunk.size]
            head.add(chunk, g, x)
        grad_hidden = _scatter_rows(grad_x, row_index, ctx.num_rows, hidden, options)
        return grad_hidden, head.result(), None, None, None


class _HeadGradient:
    """Sums the head's gradient: straight into fp32 `main_grad` where megatron's DDP made one, else into a tensor."""

    def __init__(self, parameter: Any, needed: bool) -> None:
        self.parameter = parameter
        self.main_grad: Tensor | None = getattr(parameter, "main_grad", None) if needed else None
        self.grad = torch.zeros_like(parameter) if needed and self.main_grad is None else None

    def add(self, chunk: _Chunk, g: Tensor, x: Tensor) -> None:
        target = self.grad if self.main_grad is None else self.main_grad
        if target is not None and g.shape[0]:
            part = target[chunk.start : chunk.start + chunk.size]
            part.addmm_(g.t(), x) if part.dtype == x.dtype else part.add_(g.t() @ x)

    def result(self) -> Tensor | None:
        if self.main_grad is None:
            return self.grad
        # The convention of megatron's LinearWithGradAccumulation: DDP's hook must see a gradient, and adds it only for
        # tied heads (zero_out_wgrad), whose embedding gradient arrives by autograd.
        self.parameter.grad_added_to_main_grad = True
        if getattr(self.parameter, "zero_out_wgrad", False):
            return torch.zeros_like(self.parameter)
        return torch.empty_like(self.parameter)


@dataclass(frozen=True)
class _Chunk:
    start: int  # first local row of the head shard
    size: int
    first: int  # its global vocabulary id


def _chunks(weight: Tensor, num_rows: int, options: HeadOptions) -> Iterator[_Chunk]:
    """Chunks of the local rows that are real vocabulary; none for a rank that is wholly padding."""
    offset = options.rank * weight.shape[0]
    real = max(0, min(weight.shape[0], options.vocab_size - offset))
    # two buffers of [R, chunk] live at once in the backward
    size = max(128, options.chunk_bytes // max(1, num_rows * 4 * 2))
    for start in range(0, real, size):
        yield _Chunk(start, min(size, real - start), offset + start)


def _logits(x: Tensor, weight: Tensor, chunk: _Chunk, options: HeadOptions, dtype: torch.dtype) -> Tensor:
    """[R, chunk] in `dtype`, divided by the temperature."""
    part = weight[chunk.start : chunk.start + chunk.size]
    if x.dtype == dtype:
        logits = x @ part.t()
    elif x.is_cuda:
        logits = torch.mm(x, part.t(), out_dtype=dtype)
    else:
        logits = x.to(dtype) @ part.to(dtype).t()
    return logits if options.temperature == 1.0 else logits.div_(options.temperature)


def _local_statistics(x: Tensor, weight: Tensor, y: Tensor, options: HeadOptions) -> Tensor:
    """[4, R]: maximum, sum of exponentials, sum of exponentials times logits, target logit, of the local vocabulary."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    peak = torch.full((x.shape[0],), float("-inf"), dtype=dtype, device=x.device)
    total, weighted, target = (torch.zeros_like(peak) for _ in range(3))
    for chunk in _chunks(weight, x.shape[0], options):
        logits = _logits(x, weight, chunk, options, dtype)
        new_peak = torch.maximum(peak, logits.amax(-1))
        rescale = (peak - new_peak).exp()  # exp(-inf) = 0 at the first chunk
        own = ((y >= chunk.first) & (y < chunk.first + chunk.size)).nonzero()[:, 0]
        target[own] = logits[own, y[own] - chunk.first]
        e = (logits - new_peak[:, None]).exp_()
        total = total * rescale + e.sum(-1)
        weighted = weighted * rescale + e.mul_(logits).sum(-1)
        peak = new_peak
    return torch.stack([peak, total, weighted, target])


def _merge(statistics: Tensor, options: HeadOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Local [4, R] -> (lse, log-prob, entropy) [R] over the whole vocabulary: 16 bytes per token travel."""
    every = statistics[None]
    if options.tp > 1:
        flat = statistics.new_empty((options.tp * 4, statistics.shape[1]))
        dist.all_gather_into_tensor(flat, statistics, group=options.group)
        every = flat.view(options.tp, 4, -1)
    peak, total, weighted, target = every.unbind(1)  # [tp, R]
    top = peak.amax(0)
    scale = (peak - top).exp()  # 0 for a rank that is wholly padding (peak -inf)
    total = (total * scale).sum(0)
    lse = top + total.log()
    return lse, target.sum(0) - lse, lse - (weighted * scale).sum(0) / total


def _gather_rows(hidden: Tensor, options: HeadOptions) -> Tensor:
    """[Ts, h] -> [T, h]"""
    if not options.sequence_parallel or options.tp == 1:
        return hidden
    full = hidden.new_empty((hidden.shape[0] * options.tp, *hidden.shape[1:]))
    dist.all_gather_into_tensor(full, hidden.contiguous(), group=options.group)
    return full


def _scatter_rows(grad_rows: Tensor, row_index: Tensor, num_rows: int, hidden: Tensor, options: HeadOptions) -> Tensor:
    """[active rows, h], partial over the vocabulary -> gradient of `hidden`, reduced over the tensor-parallel ranks."""
    full = grad_rows.new_zeros((num_rows, grad_rows.shape[1]))
    full[row_index] = grad_rows
    if options.tp > 1:
        if options.sequence_parallel:
            part = full.new_empty(hidden.shape)
            dist.reduce_scatter_tensor(part, full, group=options.group)
            full = part
        else:
            dist.all_reduce(full, group=options.group)
    return full.to(hidden.dtype)
