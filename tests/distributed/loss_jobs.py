"""What workers do in test_loss_layouts.py: the loss stage with a vocabulary-parallel head, and what it sends; and with
the tokens of every sequence divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadCase:
    """sequence_parallel: each rank holds a slice of the tokens. main_grad: the head's gradient goes there, in fp32 or
    better."""

    dtype: str
    sequence_parallel: bool
    chunk_bytes: int = 0
    cache_bytes: int = 0
    main_grad: bool = False


def loss_of_shards(rank: int, cases: list[HeadCase], problems: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case: loss, log-probs and entropy [T], d hidden of this rank's tokens, d weight of its rows, and the
    (collective, bytes) of forward and backward. problems: {dtype: Inputs}"""
    import torch
    import torch.distributed as dist

    from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs
    from tests.fused_loss import objective_of, spread

    sent: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name)
                 for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            piece = args[0] if name == "all_reduce" else args[1]
            sent.append((name, piece.numel() * piece.element_size()))
            return originals[name](*args, **kwargs)

        return call

    def one(case: HeadCase) -> dict[str, Any]:
        sent.clear()
        inputs = problems[case.dtype]
        inputs = inputs.to(getattr(torch, case.dtype))
        tp = dist.get_world_size()
        hidden = (inputs.hidden.chunk(tp)[rank] if case.sequence_parallel else inputs.hidden).clone().requires_grad_()
        weight: Any = torch.nn.Parameter(inputs.weight.chunk(tp)[rank].clone())
        if case.main_grad:
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32))
        options = HeadOptions(inputs.vocab, inputs.temperature, group=dist.group.WORLD,
                              sequence_parallel=case.sequence_parallel, chunk_bytes=case.chunk_bytes,
                              cache_bytes=case.cache_bytes)
        logprobs, entropy = (spread(values, inputs.mask) for values in token_logprobs(
            hidden, weight, inputs.targets, inputs.mask, options))
        forward = list(sent)
        loss, _ = objective_of(inputs, logprobs, entropy)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        grad_weight = weight.main_grad if case.main_grad else weight.grad
        found = {"loss": loss, "logprobs": logprobs, "entropy": entropy, "grad_hidden": hidden.grad,
                 "grad_weight": grad_weight}
        return {name: value.detach().double().numpy() for name, value in found.items()} | {
            "forward": forward, "backward": sent[len(forward):]}

    try:
        for name in originals:
            setattr(dist, name, counted(name))
        return [one(case) for case in cases]
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def divided(lengths: tuple[int, ...], part: int, parts: int) -> list[int]:
    """The tokens of context-parallel rank ``part``: pieces ``part`` and ``2 parts - 1 - part`` of the 2 parts pieces of
    each sequence, as megatron deals them out, whatever the length."""
    found, start = [], 0
    for length in lengths:
        cuts = [start + length * i // (2 * parts) for i in range(2 * parts + 1)]
        for piece in (part, 2 * parts - 1 - part):
            found += range(cuts[piece], cuts[piece + 1])
        start += length
    return found


def loss_of_divided_tokens(rank: int, cp: int, problems: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each of ``cp`` ranks has tokens of its own, and the others of the world a shard of the vocabulary: loss,
    log-probs and entropy [T], d hidden [T, h] with 0 at other ranks' tokens, d weight of its rows and tokens."""
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs
    from tests.fused_loss import objective_of, spread

    tp = dist.get_world_size() // cp
    heads = [dist.new_group(list(range(part * tp, (part + 1) * tp))) for part in range(cp)]
    part, shard = divmod(rank, tp)

    def one(inputs: Any) -> dict[str, Any]:
        index = torch.tensor(divided(inputs.lengths, part, cp))
        hidden = inputs.hidden[index].clone().requires_grad_()
        weight = inputs.weight.chunk(tp)[shard].clone().requires_grad_()
        mask = inputs.mask[index]

        def whole(values: Tensor) -> Tensor:
            """[T] of all ranks; its gradient is for this rank's tokens."""
            mine = values.new_zeros(inputs.mask.shape).index_put((index,), spread(values, mask))
            others = mine.detach().clone()
            dist.all_reduce(others)  # each shard of the vocabulary has the same
            return mine + (others / tp - mine.detach())

        options = HeadOptions(inputs.vocab, inputs.temperature, group=heads[part])
        logprobs, entropy = token_logprobs(hidden, weight, inputs.targets[index], mask, options)
        logprobs, entropy = whole(logprobs), whole(entropy)
        loss, _ = objective_of(inputs, logprobs, entropy)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        grad_hidden = torch.zeros_like(inputs.hidden).index_put((index,), hidden.grad)
        found = {"loss": loss, "logprobs": logprobs, "entropy": entropy, "grad_hidden": grad_hidden,
                 "grad_weight": weight.grad}
        return {name: value.detach().double().numpy() for name, value in found.items()}

    return {dtype: one(inputs.to(getattr(torch, dtype))) for dtype, inputs in problems.items()}
