"""The loss stage's matrix products by every routine against float64, for operands of every memory order."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from luspo_megatron.kernels import products

SHAPES = [(1, 1, 1), (3, 5, 2), (8, 16, 9), (70, 33, 41), (5, 0, 4)]


def operands(n: int, k: int, m: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn((k, n) if order[0] == "T" else (n, k), generator=generator)
    b = torch.randn((m, k) if order[1] == "T" else (k, m), generator=generator)
    return a.t() if order[0] == "T" else a, b.t() if order[1] == "T" else b


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == torch.float32
    largest = want.abs().max()
    assert largest > 1e-3
    assert (got - want).abs().max() <= 1e-6 * largest


@pytest.mark.parametrize("routine", ["torch", "onednn"])
@pytest.mark.parametrize("order", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, int, int], order: str, routine: str,
                         request: pytest.FixtureRequest) -> None:
    calls = request.getfixturevalue("onednn") if routine == "onednn" else []
    a, b = operands(*shape, order)
    want = a.double() @ b.double()
    start = torch.ones(want.shape)
    written, added = torch.full(want.shape, float("nan")), start.clone()
    products.write_product(written, a, b)
    products.add_product(added, a, b)
    check(added, want + 1)
    if shape[1]:
        check(written, want)
        check(products.product(a, b, torch.float32), want)
        place = torch.empty(want.shape)
        assert products.product(a, b, torch.float32, place) is place
        check(place, want)
    assert bool(calls) == (routine == "onednn" and shape[1] > 0)


def test_parts_of_a_larger_gradient(onednn: list[object]) -> None:
    """A head's gradient is written and added to chunk by chunk, in rows of one large tensor."""
    a, b = operands(40, 30, 20, "TN")
    total = torch.ones((100, 20))
    products.add_product(total[10:50], a, b)
    check(total[10:50], a.double() @ b.double() + 1)
    assert total[:10].eq(1).all() and total[50:].eq(1).all() and onednn


def test_small_products_and_other_dtypes_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    large, small = torch.empty((256, 256)), torch.empty((256, 255))
    assert products._by_onednn(large, large) and not products._by_onednn(large, small)
    assert not products._by_onednn(large.double(), large.double())
    assert not products._by_onednn(large.bfloat16(), large.bfloat16())
    assert not products._by_onednn(large.to("meta"), large.to("meta"))


def test_processors_without_avx512_keep_torchs() -> None:
    code = "from luspo_megatron.kernels.products import onednn_is_faster; print(onednn_is_faster())"
    run = subprocess.run([sys.executable, "-c", code], env={"ATEN_CPU_CAPABILITY": "avx2"}, capture_output=True,
                         text=True, check=True, timeout=60)
    assert run.stdout == "False\n"
