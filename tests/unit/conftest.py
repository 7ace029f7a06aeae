"""What several unit tests want of the environment."""

from __future__ import annotations

from typing import Any

import pytest

from luspo_megatron.kernels import products


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """oneDNN computes float32 products of every size, a few rows at a time. The calls, for a test to see."""
    calls: list[Any] = []
    by_onednn = products._onednn

    def counted(*operands: Any) -> Any:
        calls.append(operands)
        return by_onednn(*operands)

    monkeypatch.setattr(products, "_onednn", counted)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "ROWS", 8)
    return calls
