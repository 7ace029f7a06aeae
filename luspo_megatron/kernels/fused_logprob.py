"""Log-probs and entropy of given tokens from hidden states and a vocabulary-parallel head, without [T, V] logits.

One autograd function serves training, old and reference log-probs. The objective lives on the resulting [R] vectors, so
it needs no second pass over the vocabulary. With x = hidden @ weight.T / temperature, p = softmax(x):

    logp = x[target] - lse          H = lse - sum p x
    d logp / d x_v = 1[v = target] - p_v        d H / d x_v = -p_v (x_v - lse + H)

Each tensor-parallel rank sums over its own vocabulary rows; one all-gather of four numbers per token joins them.
Statistics are float32 (float64 for float64 input) of float32 logits: with bfloat16 logits the noise of the
sequence-mean log-ratio is as large as LUSPO's clip range. The vocabulary is cut into chunks sized by a memory budget,
forward and backward. The backward recomputes the logits, but for the chunks whose exponentials fit the cache's budget.
Only the wanted rows enter at all, and rows whose incoming gradients are zero (clipped, zero advantage) take no part in
the backward.

docs/loss.md has the derivation. Left out: context parallelism needs nothing here (rows are independent); the objective
exchanges its own sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luspo_megatron.kernels.head import (
    Chunk,
    HeadGradient,
    HeadOptions,
    Workspace,
    cache_budget,
    chunks,
    gather_rows,
    real_rows,
    scatter_rows,
    take_rows,
)
from luspo_megatron.kernels.products import add_product, product
from luspo_megatron.kernels.rows import RowGradients, Rows, merge, row_backend

__all__ = ["HeadOptions", "token_logprobs"]


def token_logprobs(hidden: Float[Tensor, "Ts h"], weight: Float[Tensor, "Vt h"], targets: Int[Tensor, " T"],
                   rows: Bool[Tensor, " T"], options: HeadOptions) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-prob of the target and entropy at the R rows where `rows` is True, the same on every tensor-parallel rank.

    Ts = T / tp under sequence parallelism, else T; Vt = padded vocabulary / tp. Results are float32, or float64 for
    float64 input. Gradients: hidden (summed over the vocabulary ranks, reduce-scattered under sequence parallelism) and
    weight (added to `weight.main_grad` in place where megatron's DDP has made one, else returned). Under
    `torch.no_grad()` nothing is kept. Targets at the wanted rows must lie in 0 .. vocab_size - 1. Raises UserError
    when the asked backend cannot run.
    """
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _TokenLogprobs.apply(hidden, weight, targets, rows, options, keep)  # type: ignore[no-any-return]


class _Cache:
    """e^(x - reference) of the first chunks of the vocabulary, in the weight's dtype, up to a budget of bytes.

    The backward empties it as it goes, so that its memory is free again for the head's gradient; a second backward
    (retain_graph) recomputes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.entries: list[tuple[Chunk, Tensor, Tensor]] = []  # chunk, exponentials [R, C], reference [R]
        self.end = 0  # first local row of the head that is not cached

    def room(self, chunk: Chunk, rows: int, weight: Tensor) -> Tensor | None:
        size = rows * chunk.size * weight.element_size()
        if size > self.budget or chunk.start != self.end:
            self.budget = 0  # the cached part stays contiguous
            return None
        self.budget -= size
        return weight.new_empty((rows, chunk.size))

    def add(self, chunk: Chunk, exps: Tensor, reference: Tensor) -> None:
        self.entries.append((chunk, exps, reference))
        self.end = chunk.start + chunk.size

    def drain(self) -> Iterator[tuple[Chunk, Tensor, Tensor]]:
        self.end = 0
        while self.entries:
            yield self.entries.pop(0)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, options: HeadOptions,
                keep: bool) -> tuple[Tensor, Tensor]:
        backend = row_backend(options, weight)
        row_index = rows.nonzero()[:, 0]  # [R]
        x = take_rows(gather_rows(hidden, options), row_index)  # [R, h]
        y = targets[row_index]
        cache = _Cache(cache_budget(weight, options) if keep else 0)
        state = _local_statistics(backend, x, weight, y, options, cache)
        lse, logprobs, entropy = _join_ranks(state, options)
        if keep:
            ctx.save_for_backward(hidden, weight, y, row_index, lse, logprobs, entropy)
            ctx.options, ctx.parameter, ctx.num_rows = options, weight, rows.shape[0]
            ctx.backend, ctx.cache = backend, cache
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, y, row_index, lse, logprobs, entropy = ctx.saved_tensors
        options: HeadOptions = ctx.options
        active = ((grads[0] != 0) | (grads[1] != 0)).nonzero()[:, 0]
        rows = _row_gradients(active, lse, logprobs, entropy, grads, 1.0 / options.temperature)
        row_index = row_index[active]
        x = take_rows(gather_rows(hidden, options), row_index)
        head = HeadGradient(ctx.parameter, ctx.needs_input_grad[1], real_rows(weight, options))
        grad_x = _backward_chunks(ctx.backend, ctx.cache, x, weight, y[active], rows, options, head)
        grad_hidden = scatter_rows(grad_x, row_index, ctx.num_rows, hidden, options)
        return grad_hidden, head.result(), None, None, None, None


def _local_statistics(backend: Rows, x: Tensor, weight: Tensor, y: Tensor, options: HeadOptions,
                      cache: _Cache) -> Tensor:
    """[4, R]: peak, total, weighted, target over the local vocabulary; fills the cache."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    state = torch.zeros((4, x.shape[0]), dtype=dtype, device=x.device)
    state[0] = float("-inf")
    if x.shape[0] == 0:
        return state
    space = Workspace(x.device)
    wide = x if x.is_cuda else x.to(dtype)
    for chunk in chunks(weight, x.shape[0], options):
        logits = _logits(wide, weight, chunk, dtype, space)
        exps = cache.room(chunk, x.shape[0], weight)
        reference = backend.statistics(logits, y - chunk.first, 1.0 / options.temperature, state, exps, space)
        if exps is not None and reference is not None:
            cache.add(chunk, exps, reference)
    return state


def _logits(x: Tensor, weight: Tensor, chunk: Chunk, dtype: torch.dtype, space: Workspace) -> Tensor:
    """[R, C] in `dtype`, not divided by the temperature; x is already in `dtype` on the CPU."""
    part = chunk.of(weight)
    if x.is_cuda:
        return product(x, part.t(), dtype)
    return product(x, part.to(dtype).t(), dtype, space.take(0, x.shape[0], chunk.size, dtype))


def _join_ranks(state: Tensor, options: HeadOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Local [4, R] -> (lse, log-prob, entropy) [R] over the whole vocabulary: 16 bytes per token travel."""
    if options.tp > 1:
        flat = state.new_empty((options.tp * 4, state.shape[1]))
        dist.all_gather_into_tensor(flat, state, group=options.group)
        state = merge(flat.view(options.tp, 4, -1))
    peak, total, weighted, target = state
    log_total = total.log()
    return peak + log_total, (target - peak) - log_total, log_total - weighted / total


def _row_gradients(active: Tensor, lse: Tensor, logprobs: Tensor, entropy: Tensor, grads: tuple[Tensor, ...],
                   inv_temperature: float) -> RowGradients:
    grad_logp, grad_entropy = (grad.to(lse.dtype)[active] for grad in grads)
    logp, h = logprobs[active], entropy[active]
    # 1 - p by expm1: most tokens of a trained policy have p near 1
    own = -torch.expm1(logp) * grad_logp - logp.exp() * (logp + h) * grad_entropy
    return RowGradients(active, lse[active], h, grad_logp, grad_entropy, own * inv_temperature,
                        grad_logp * -inv_temperature, with_entropy=bool((grad_entropy != 0).any()))


def _backward_chunks(backend: Rows, cache: _Cache, x: Tensor, weight: Tensor, y: Tensor, rows: RowGradients,
                     options: HeadOptions, head: HeadGradient) -> Tensor:
    """Gradient of the active rows [R, h], partial over the vocabulary; the head's goes to `head`."""
    dtype = rows.lse.dtype
    inv_temperature = 1.0 / options.temperature
    grad_x = torch.zeros(x.shape, dtype=dtype, device=x.device)
    space, few = Workspace(x.device), Workspace(x.device)  # few: [R, h], while there is a cache
    wide = x if x.is_cuda else x.to(dtype)
    based = None  # x * base, once it is wanted

    def sources() -> Iterator[tuple[Chunk, Tensor, Tensor | None]]:
        start = cache.end
        yield from cache.drain()
        for chunk in chunks(weight, x.shape[0], options, start=start):
            yield chunk, _logits(wide, weight, chunk, dtype, space), None

    for chunk, source, reference in sources():
        g = backend.gradient(source, reference, y - chunk.first, rows, inv_temperature, weight.dtype, space)
        if g.complete:
            add_product(grad_x, g.matrix, chunk.of(weight))
            head.write(chunk, g.matrix, x)
            continue
        # grad_x and based hold what is to be multiplied, and has been multiplied, by the rows' base
        based = wide * rows.base[:, None] if based is None else based
        if g.factor is None:
            few.clear()
            add_product(grad_x, g.matrix, chunk.of(weight))
            head.write(chunk, g.matrix, based.to(weight.dtype))
        else:
            factor = g.factor[:, None]
            part_dtype = dtype if x.is_cuda else weight.dtype
            part = few.take(0, x.shape[0], x.shape[1], part_dtype)
            grad_x.addcmul_(product(g.matrix, chunk.of(weight), part_dtype, part), factor)
            scaled = torch.mul(based, factor, out=few.take(0, x.shape[0], x.shape[1], dtype))
            head.write(chunk, g.matrix, scaled.to(weight.dtype))
    if based is not None:
        grad_x.mul_(rows.base[:, None])
        _add_targets(grad_x, x, weight, y, rows, options, head)
    return grad_x


def _add_targets(grad_x: Tensor, x: Tensor, weight: Tensor, y: Tensor, rows: RowGradients, options: HeadOptions,
                 head: HeadGradient) -> None:
    """The entry of the target itself, on the rank that owns it."""
    local = y - options.rank * weight.shape[0]
    mine = ((local >= 0) & (local < real_rows(weight, options))).nonzero()[:, 0]
    local, own = local[mine], rows.own[mine, None]
    grad_x[mine] += own * weight[local]
    head.add_rows(local, own * x[mine])
