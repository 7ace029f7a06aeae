"""The same tokens through both sides: transformers for a Hugging Face folder, the actor for a Megatron checkpoint.

Float32 in this process, whatever the stored dtype, so that the comparison is about weights and names alone. Two sides
of one kind run the same code and must give the same bits. Meant for models that fit in memory twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from luspo_megatron.convert.sources import Checkpoint, open_checkpoint
from luspo_megatron.convert.verify import Report

LENGTHS = (37, 11)
TOLERANCE = 2e-4
"""Largest difference of two logits, as a share of the largest logit; float32 summation order gives about 1e-5."""


def compare_logits(a: str, b: str, hf_config: str | None, family: str, report: Report) -> None:
    """Adds a note with the largest difference, and a problem where it is above TOLERANCE."""
    sides = [open_checkpoint(path, hf_config, family) for path in (a, b)]
    sequences = make_sequences(sides[0].arch.vocab_size)
    # transformers first: the actor's CPU platform changes torch for the whole process
    order = sorted(range(2), key=lambda i: sides[i].kind)
    results: dict[int, list[Tensor]] = {}
    for i in order:
        run = hf_logits if sides[i].kind == "huggingface" else actor_logits
        results[i] = run(sides[i], sequences)
    largest = max(t.abs().max().item() for t in results[0])
    difference = max((x - y).abs().max().item() for x, y in zip(results[0], results[1], strict=True))
    same_choice = all(torch.equal(x.argmax(-1), y.argmax(-1)) for x, y in zip(results[0], results[1], strict=True))
    limit = 0.0 if sides[0].kind == sides[1].kind else TOLERANCE * largest
    line = f"logits of {sum(LENGTHS)} tokens differ by at most {difference:.2e}, the largest is {largest:.2f}"
    if difference > limit or not same_choice:
        report.problems.append(f"{a} and {b}: {line}; allowed {limit:.2e}")
    else:
        report.notes.append(f"{a} and {b}: {line}, the same greedy choices")


def make_sequences(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def hf_logits(side: Checkpoint, sequences: list[list[int]]) -> list[Tensor]:
    """[tokens, vocabulary] per sequence."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(side.path, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences]


def actor_logits(side: Checkpoint, sequences: list[list[int]]) -> list[Tensor]:
    """[tokens, vocabulary] per sequence, from the actor in this process alone."""
    import torch.distributed as dist

    from luspo_megatron import run
    from luspo_megatron.actor.groups import join, leave
    from luspo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
    from luspo_megatron.parallel import ParallelLayout

    run.quiet_libraries()
    model = ModelConfig(hf=str(side.config_folder), megatron=str(side.weights), family=side.arch.family,
                        dtype="float32")
    ranks = join(ParallelLayout(), seed=0, store=dist.HashStore(), rank=0)
    try:
        actor = run.build_actor(ranks, model, ParallelConfig(), OptimizerConfig(), BatchConfig(), trainable=False)
        return packed_logits(actor, sequences)
    finally:
        leave()


def packed_logits(actor: Any, sequences: list[list[int]]) -> list[Tensor]:
    """One packed forward of an actor without parallelism."""
    from luspo_megatron.platform.packing import pack_params

    lengths = [len(ids) for ids in sequences]
    packing = pack_params(np.cumsum([0, *lengths]).astype(np.int32), actor.device)
    tokens = torch.tensor([[i for ids in sequences for i in ids]], device=actor.device)
    with torch.no_grad():
        logits = actor.gpt(input_ids=tokens, position_ids=packing.positions[None],  # type: ignore[index]
                           attention_mask=None, packed_seq_params=packing)
    return [t.float().cpu() for t in logits[0, :, : actor.arch.vocab_size].split(lengths)]
