"""Loss and gradients do not depend on how the samples of a mini-batch are cut, ordered, padded or spread.

And samples without a response, masked ones, and what stands in the old log-probs outside the mask change nothing.
The reference is the plainest split: all samples in order in one micro-batch on one rank. That this one is right is
shown against transformers in test_layouts.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luspo_megatron.config import AlgorithmConfig
from luspo_megatron.types import Sample
from luspo_megatron.weights.architecture import read_architecture
from luspo_megatron.weights.table import WeightTable
from tests.distributed.actor_jobs import Case, assemble
from tests.distributed.split_jobs import Split, split_steps
from tests.tiny import samples_of, save_model
from tests.workers import pool

N = 8
ALL = range(N)
EMPTY = N  # a ninth sample, whose response is empty
ALGORITHMS = {
    "luspo": AlgorithmConfig(objective="luspo", clip_low=0.02, clip_high=0.03, entropy_coef=0.01),
    "dapo": AlgorithmConfig(objective="dapo", clip_low=0.1, clip_high=0.1),
    "drgrpo": AlgorithmConfig(objective="drgrpo", clip_low=0.1, clip_high=0.1),
}


def even(dp: int, parts: int, order: Any = ALL) -> list[list[tuple[int, ...]]]:
    """The samples in `order`, spread over dp ranks with `parts` micro-batches each."""
    pieces = iter(np.array_split(np.array(order), dp * parts))
    return [[tuple(int(i) for i in next(pieces)) for _ in range(parts)] for _ in range(dp)]


SPLITS = {
    1: [Split(even(1, 1)), Split(even(1, 2)), Split(even(1, 4)), Split(even(1, 8)),
        Split(even(1, 1, [5, 2, 7, 0, 1, 6, 3, 4])), Split(even(1, 3, [7, 6, 5, 4, 3, 2, 1, 0])),
        Split(even(1, 1), multiple=64), Split(even(1, 4), multiple=16), Split([[(), (0, 1, 2), (), (3, 4, 5, 6, 7)]])],
    2: [Split(even(2, 1)), Split(even(2, 4)), Split([[(0,), (1,), (2,)], [(3, 4, 5), (6, 7), ()]], multiple=8),
        Split([[tuple(ALL)], [()]])],
    4: [Split(even(4, 1)), Split(even(4, 2, [3, 1, 4, 0, 5, 7, 2, 6])),
        Split([[(0,)], [(1, 2, 3)], [(4, 5, 6, 7)], [()]])],
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_model(tmp_path_factory.mktemp("model"), "moe", layers=2)
    samples = samples_of(seed=6, groups=4, group_size=2)
    samples.append(Sample(9, 0, [3, 4, 5], [], [], "abort", 0, 0))
    rng = np.random.default_rng(1)
    advantages = rng.normal(size=N + 1)
    old = [-5.7 + 0.3 * rng.normal(size=len(s.response_ids)) for s in samples]
    return folder, samples, advantages, old, sum(len(s.response_ids) for s in samples)


def run(case: Case, setting: Any, algorithm: AlgorithmConfig, splits: list[Split], num_sequences: int = N,
        num_tokens: int | None = None) -> list[dict[str, Any]]:
    """[split] -> loss, per-sample statistics and whole gradients by Hugging Face name."""
    folder, samples, advantages, old, all_tokens = setting
    results = pool(case.world).run(split_steps, case, folder, samples, advantages, old, algorithm, splits,
                                   num_sequences, num_tokens or all_tokens)
    table = WeightTable(read_architecture(folder))
    out = []
    for i in range(len(splits)):
        mine = [result[i] for result in results]
        out.append({**mine[0], "gradients": assemble(mine, "gradients", table)})
    return out


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["sums"]["loss"] == pytest.approx(want["sums"]["loss"], rel=1e-5)
    assert got["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=1e-5)
    assert got["gradients"].keys() == want["gradients"].keys()
    for name, value in want["gradients"].items():
        assert np.abs(got["gradients"][name] - value).max() <= 1e-5 * np.abs(value).max(), name


@pytest.fixture(scope="module")
def references(setting: Any) -> dict[str, dict[str, Any]]:
    out = {}
    for name, algorithm in ALGORITHMS.items():
        [found] = run(Case(), setting, algorithm, [Split(even(1, 1))])
        assert abs(found["sums"]["loss"]) > 1e-3 and found["gradient_norm"] > 1e-2
        assert all(np.abs(value).max() > 1e-7 for value in found["gradients"].values())
        out[name] = found
    return out


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_split_does_not_matter(name: str, dp: int, setting: Any, references: Any) -> None:
    for split, got in zip(SPLITS[dp], run(Case(world=dp), setting, ALGORITHMS[name], SPLITS[dp]), strict=True):
        try:
            same(got, references[name])
        except AssertionError as error:
            raise AssertionError(f"{split}: {error}") from error
        assert sorted(got["per_sample"]["clipped"]) == list(ALL)


@pytest.mark.parametrize("case", [Case(world=2, tp=2), Case(world=2, ep=2), Case(world=2, pp=2)],
                         ids=lambda case: str(case.layout))
def test_nor_does_it_in_parallel_layouts(case: Case, setting: Any, references: Any) -> None:
    dp = case.layout.dp
    splits = [Split(even(dp, 1), multiple=2), Split(even(dp, 4, [3, 1, 4, 0, 5, 7, 2, 6]), multiple=2)]
    for got in run(case, setting, ALGORITHMS["luspo"], splits):
        same(got, references["luspo"])


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_samples_without_tokens_and_what_is_masked_change_nothing(name: str, dp: int, setting: Any) -> None:
    """The denominators stay those of nine sequences: the ninth adds nothing to the sum."""
    whole = even(dp, 1)
    *rest, last = whole
    with_empty = [*rest, [(*last[0], EMPTY)]]
    own = [[*rank, ()] for rank in rest] + [[*last, (EMPTY,)]]
    one_masked = tuple(i for i in ALL if i != 2)
    [want] = run(Case(), setting, ALGORITHMS[name], [Split([[tuple(ALL)]])], N + 1)
    [without] = run(Case(), setting, ALGORITHMS[name], [Split([[one_masked]])], N + 1)
    assert abs(without["sums"]["loss"] - want["sums"]["loss"]) > 1e-3, "sample 2 does count otherwise"
    splits = [Split(with_empty), Split(own), Split(with_empty, spoil_advantages=[EMPTY]),
              Split(with_empty, spoil_old=True), Split(own, spoil_old=True, multiple=16, spoil_advantages=[EMPTY])]
    for split, got in zip(splits, run(Case(world=dp), setting, ALGORITHMS[name], splits, N + 1), strict=True):
        try:
            same(got, want)
        except AssertionError as error:
            raise AssertionError(f"{split}: {error}") from error
    masked = [replace(Split(with_empty), masked=[2]),
              Split(with_empty, masked=[2], spoil_old=True, spoil_advantages=[2, EMPTY])]
    for got in run(Case(world=dp), setting, ALGORITHMS[name], masked, N + 1):
        same(got, without)


def test_a_mini_batch_of_nothing_but_empty_and_masked_samples(setting: Any) -> None:
    splits = [Split([[(EMPTY,)]]), Split([[(0, EMPTY), (1,)]], masked=[0, 1], spoil_old=True, spoil_advantages=[0])]
    for got in run(Case(), setting, ALGORITHMS["luspo"], splits, N + 1):
        assert got["sums"]["loss"] == 0 and got["gradient_norm"] == 0
        assert all((value == 0).all() for value in got["gradients"].values())
