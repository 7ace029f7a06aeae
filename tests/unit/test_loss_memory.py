"""Peak memory of the loss stage grows with its chunk, not with tokens times vocabulary (Linux: /proc/self).

One pass at T and one at 4T, each in a process of its own, resident bytes above the inputs; h is small, so that what
does grow with T, a few [T, h], is small beside the chunk. Naive autograd through the same meter shows that it measures.
"""

from __future__ import annotations

import sys

import pytest

from benchmarks.memory import in_new_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
T, H, V = 512, 16, 32768
LOGITS = T * V * 4


def peak(contender: str, tokens: int) -> int:
    return int(in_new_process("benchmarks.loss_cases", contender, "--tokens", str(tokens), "--hidden", str(H),
                              "--vocab", str(V), "--threads", "1", timeout=200))


@pytest.mark.parametrize("contender", ["recompute", "default"])
def test_four_times_the_tokens_in_the_same_memory(contender: str) -> None:
    small, large = peak(contender, T), peak(contender, 4 * T)
    assert large - small < LOGITS / 8, "the logits of the further tokens alone are 3 LOGITS"
    assert large < LOGITS, "at 4T the logits are 4 LOGITS"
    assert small > 2**23, "a chunk was seen"


def test_the_meter_sees_what_naive_autograd_holds() -> None:
    assert peak("naive", T) > 2.5 * LOGITS
