"""What worker processes do in the conversion tests."""

from __future__ import annotations

from typing import Any

from tests.distributed.actor_jobs import Case, actor_of, shards


def weights_twice(rank: int, case: Case, hf: Any, megatron: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shards of an actor that read the Hugging Face folder, and after it read the converted one over other weights."""
    import torch

    from luspo_megatron.actor import checkpoint

    with actor_of(rank, case, hf) as actor:
        first = shards(actor, lambda p: p)
        with torch.no_grad():
            for parameter in actor.gpt.parameters():
                parameter.fill_(7.0)
        checkpoint.load_weights(actor, megatron)
        return first, shards(actor, lambda p: p)


def greedy_choices(rank: int, hf: Any, trained: Any, sequences: list[list[int]]) -> list[list[int]]:
    """argmax of the actor's logits at every position, the actor restored from a training checkpoint."""
    from luspo_megatron.actor import checkpoint
    from luspo_megatron.convert.logits import packed_logits

    with actor_of(rank, Case(), hf) as actor:
        checkpoint.load(actor, trained, with_optimizer=False)
        return [logits.argmax(-1).tolist() for logits in packed_logits(actor, sequences)]
