"""Compares the Triton row kernels, in triton's interpreter, with the torch backend on the CPU; prints JSON.

    TRITON_INTERPRET=1 python -m tests.unit.triton_check      (a process of its own: the interpreter replaces the
                                                               compiler when triton is imported)

{case: {quantity: largest difference / largest element}} of log-probs, entropy, d hidden and d weight.
"""

from __future__ import annotations

import itertools
import json

import torch

from luspo_megatron.kernels import rows
from luspo_megatron.kernels.fused_logprob import HeadOptions
from luspo_megatron.kernels.rows import merge, row_backend
from tests.fused_loss import fused
from tests.loss_inputs import make_inputs, relative_error

CACHES = {"no": 0, "part": 150 * 4 * 20, "all": 2**40}


def compare() -> dict[str, dict[str, float]]:
    assert rows.triton_usable(torch.device("cpu")), "not triton's interpreter"
    assert type(row_backend(HeadOptions(7, backend="triton"), torch.zeros(1))).__name__ == "TritonRows"
    out = {}
    grid = itertools.product(("float32", "bfloat16"), CACHES, (0.0, 0.02), (1.0, 0.7))
    for dtype, cache, entropy_coef, temperature in grid:
        # 2500 columns: a full block of 2048 and a part of one; chunks of 128 columns in the second problem
        for vocab, chunk_bytes in ((2500, 0), (301, 1)):
            wide = getattr(torch, dtype)
            inputs = make_inputs((4, 0, 6), 8, vocab, vocab + 20, seed=3, dtype=wide, temperature=temperature,
                                 entropy_coef=entropy_coef).to(wide)
            ours, want = (fused(inputs, backend=backend, chunk_bytes=chunk_bytes, cache_bytes=CACHES[cache])
                          for backend in ("triton", "torch"))
            name = f"{dtype} cache={cache} entropy={entropy_coef} temperature={temperature} vocab={vocab}"
            out[name] = {
                "logprobs": relative_error(ours.logprobs, want.logprobs.double(), 1.0),
                "entropy": relative_error(ours.entropy, want.entropy.double(), 1.0),
                "grad_hidden": relative_error(ours.grad_hidden, want.grad_hidden.double(), 1e-3),
                "grad_weight": relative_error(ours.grad_weight, want.grad_weight.double(), 1e-3),
            }
    return out


def statistics_of_extremes() -> float:
    """Rows whose maximum is in the last block, in the first, and -1e4 everywhere, folded into a state that holds
    something: the largest difference from the torch backend."""
    from luspo_megatron.kernels.head import Workspace
    from luspo_megatron.kernels.torch_rows import TorchRows
    from luspo_megatron.kernels.triton_rows import TritonRows

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 2100, generator=generator)
    logits[0, 2099], logits[1, 0], logits[2] = 80.0, 80.0, -1e4
    column = torch.tensor([2099, -5, 7, 2100])
    empty = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])[:, None].expand(4, 4)
    held = torch.stack([torch.tensor([90.0, 1.0, -1.0, 0.0]), torch.tensor([2.0, 1.0, 5.0, 3.0]), torch.zeros(4) - 0.1,
                        torch.tensor([0.0, 0.0, 0.0, 4.0])])
    worst = 0.0
    for start in (empty, held):
        states = []
        for backend in (TritonRows(), TorchRows()):
            state = start.clone().contiguous()
            backend.statistics(logits.clone(), column, 1.0, state, None, Workspace(logits.device))
            states.append(state)
        assert states[1].isfinite().all() and states[1].abs().amax(1).min() > 0.05
        # row by row of the state: the peak of the third row is -1e4
        worst = max(worst, *((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(*states, strict=True)))
    assert merge(torch.stack([empty, held])).allclose(held)
    return worst


if __name__ == "__main__":
    print(json.dumps(compare() | {"extremes": {"statistics": statistics_of_extremes()}}))
