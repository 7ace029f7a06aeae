"""The loss stage over 1, 2 and 4 vocabulary shards against the float64 oracle of tests/loss_inputs.py.

With and without sequence parallelism, packed sequences with an empty one, temperature, KL, entropy; the padding of the
vocabulary fills the last of 4 shards wholly and part of the one before. Also what travels: 16 bytes a token between
forward and backward (float32). test_layouts.py does the same through a model. Context parallelism does not exist yet;
what it will need of the loss stage is shown: rows of a sequence that lie on several ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.loss_jobs import HeadCase, divided, loss_of_divided_tokens, loss_of_shards
from tests.loss_inputs import Outcome, make_inputs, oracle, relative_error
from tests.workers import pool

LENGTHS = (7, 0, 5, 9, 3)  # 24 tokens: every tp divides them
VOCAB, PADDED, HIDDEN = 133, 192, 16  # of 4 shards of 48 rows, the third has 37 real ones and the fourth none
TOLERANCE = {"float64": 1e-12, "float32": 1.5e-6, "bfloat16": 2**-7}
STATISTICS_BYTES = {"float64": 32, "float32": 16, "bfloat16": 16}
CASES = [
    *(HeadCase(dtype, sp, main_grad=main) for dtype in TOLERANCE for sp in (False, True) for main in (False, True)),
    *(HeadCase("float64", sp, chunk_bytes=1, cache_bytes=cache) for sp in (False, True) for cache in (-1, 2**40)),
]


@pytest.fixture(scope="module")
def problems() -> dict[str, tuple[object, Outcome]]:
    out = {}
    for dtype in TOLERANCE:
        inputs = make_inputs(LENGTHS, HIDDEN, VOCAB, PADDED, seed=4, dtype=getattr(torch, dtype), temperature=0.8,
                             kl_coef=0.05, entropy_coef=0.01)
        want = oracle(inputs)
        assert 0 < want.clipped < 4
        out[dtype] = (inputs, want)
    return out


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_shards(tp: int, problems: dict[str, tuple[object, Outcome]]) -> None:
    inputs = {dtype: made for dtype, (made, _) in problems.items()}
    results = pool(tp).run(loss_of_shards, CASES, inputs)
    for i, case in enumerate(CASES):
        want, ranks = problems[case.dtype][1], [result[i] for result in results]
        try:
            check(case, tp, ranks, want, problems[case.dtype][0].mask)  # type: ignore[attr-defined]
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("tp", [1, 2])
def test_sequences_divided_over_two_ranks(tp: int, problems: dict[str, tuple[object, Outcome]]) -> None:
    """As context parallelism will divide them; the objective takes the log-probs of all ranks."""
    parts = [divided(LENGTHS, part, 2) for part in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(sum(LENGTHS))) and min(map(len, parts)) > 6
    exact = {dtype: made for dtype, (made, _) in problems.items() if dtype != "bfloat16"}
    results = pool(2 * tp).run(loss_of_divided_tokens, 2, exact)
    for dtype in exact:
        want, mask = problems[dtype][1], problems[dtype][0].mask  # type: ignore[attr-defined]
        ranks = [result[dtype] for result in results]
        for rank in ranks:
            assert relative_error(torch.tensor(rank["loss"]), want.loss, 1e-3) <= TOLERANCE[dtype]
            for name in ("logprobs", "entropy"):
                found = torch.from_numpy(rank[name])[mask]
                assert relative_error(found, getattr(want, name)[mask], 1.0) <= min(TOLERANCE[dtype], 4e-7), name
        hidden = sum(torch.from_numpy(rank["grad_hidden"]) for rank in ranks[::tp])
        weight = torch.cat([torch.from_numpy(ranks[shard]["grad_weight"] + ranks[tp + shard]["grad_weight"])
                            for shard in range(tp)])
        assert relative_error(hidden, want.grad_hidden, 1e-2) <= TOLERANCE[dtype]
        assert relative_error(weight, want.grad_weight, 1e-2) <= TOLERANCE[dtype]


def check(case: HeadCase, tp: int, ranks: list[dict[str, object]], want: Outcome, mask: torch.Tensor) -> None:
    tolerance = TOLERANCE[case.dtype]
    exact = 1e-12 if case.dtype == "float64" else 4e-7  # also for bfloat16: statistics are those of float32 logits
    for rank in ranks:
        assert relative_error(torch.tensor(rank["loss"]), want.loss, 1e-3) <= min(tolerance, 4e-6)
        assert relative_error(torch.from_numpy(rank["logprobs"])[mask], want.logprobs[mask], 1.0) <= exact
        assert relative_error(torch.from_numpy(rank["entropy"])[mask], want.entropy[mask], 1.0) <= exact
    hiddens = [torch.from_numpy(rank["grad_hidden"]) for rank in ranks]
    for hidden in [torch.cat(hiddens)] if case.sequence_parallel else hiddens:
        assert relative_error(hidden, want.grad_hidden, 1e-2) <= tolerance
    weight = torch.from_numpy(np.concatenate([rank["grad_weight"] for rank in ranks]))
    assert relative_error(weight, want.grad_weight, 1e-2) <= tolerance
    assert weight[VOCAB:].eq(0).all()
    if tp > 1:
        check_traffic(case, tp, ranks, int(mask.sum()))


def check_traffic(case: HeadCase, tp: int, ranks: list[dict[str, object]], rows: int) -> None:
    size = {"float64": 8, "float32": 4, "bfloat16": 2}[case.dtype]
    wide = max(size, 4)
    tokens = sum(LENGTHS)
    gather = ("all_gather_into_tensor", tokens // tp * HIDDEN * size)
    reduction = ("reduce_scatter_tensor" if case.sequence_parallel else "all_reduce", tokens * HIDDEN * wide)
    statistics = ("all_gather_into_tensor", STATISTICS_BYTES[case.dtype] * rows)
    for rank in ranks:
        assert rank["forward"] == [gather] * case.sequence_parallel + [statistics]
        assert rank["backward"] == [gather] * case.sequence_parallel + [reduction]
