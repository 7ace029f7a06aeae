"""group_advantages against hand numbers and the golden cases."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luspo_megatron.algorithm.advantages import group_advantages

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "luspo_goldens.json").read_text())["cases"]


@pytest.mark.parametrize("ddof, key", [(0, "advantages"), (1, "advantages_ddof1")])
@pytest.mark.parametrize("case", GOLDENS, ids=lambda c: c["name"][0])
def test_goldens(case, ddof, key):
    actual = group_advantages(case["rewards"], case["group"], ddof=ddof, eps=0.0)
    expected = torch.tensor(case[key], dtype=torch.float64)
    assert expected.abs().max() > 0.5 and actual.dtype == torch.float64
    assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max()


def test_groups_of_four_and_three_by_id():
    """Field case 7: a dropped sample must not merge groups; ids need not be adjacent or sorted."""
    ids = [70, 5, 70, 5, 70, 5, 70]
    rewards = [1, 0, 0, 3, 0, 0, 1]
    actual = group_advantages(rewards, ids)
    four, three = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(3) + 1e-6)
    assert actual.tolist() == pytest.approx([four, -three, -four, 2 * three, -four, -three, four], rel=1e-14)
    assert group_advantages(rewards, ids, std=False).tolist() == pytest.approx([0.5, -1, -0.5, 2, -0.5, -1, 0.5])


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(
    "rewards",
    [[0.0] * 4, [0.1] * 4, [0.3, 0.1 + 0.2, 0.3], [0.0, 0.1 + 0.2 - 0.3, 0.0], [1.0, 1 + 1e-7, 1.0], [-7.3]],
)
def test_equal_rewards_are_exactly_zero(rewards, std):
    group = group_advantages([*rewards, 1.0, 0.0], [1] * len(rewards) + [2, 2], std=std)
    assert group[:-2].tolist() == [0.0] * len(rewards)
    assert group[-2] > 0.4


def test_small_real_differences_count():
    """An overlong penalty differs by 0.3/4096 per token."""
    assert group_advantages([1.0, 1.0 - 0.3 / 4096], [0, 0], eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.2, 0.5, 1.0, 1.5])), min_size=1, max_size=30))
def test_moments(pairs):
    ids, rewards = [p[0] for p in pairs], [p[1] for p in pairs]
    actual = group_advantages(rewards, ids, eps=0.0)
    for group in set(ids):
        mine = actual[torch.tensor(ids) == group]
        varied = len({r for i, r in pairs if i == group}) > 1
        assert abs(mine.sum()) < 1e-12
        assert not varied or float(mine.std()) == pytest.approx(1, rel=1e-12)
        assert varied or not mine.any()


def test_refusals():
    with pytest.raises(ValueError, match="sample 1"):
        group_advantages([0.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match="ddof"):
        group_advantages([0.0], [0], ddof=2)
    with pytest.raises(ValueError, match="group ids"):
        group_advantages([0.0, 1.0], [0])
    assert group_advantages([], []).tolist() == []
