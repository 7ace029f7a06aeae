"""The Triton row kernels in triton's interpreter against the torch backend, whole losses with their gradients.

Covered: both dtypes, cache of all, part and none, entropy gradients, temperature, compaction (a clipped sequence),
several blocks of columns. What the interpreter does not show: real float32 instructions, races. It truncates when it
rounds to bfloat16, hence one more unit in the last place there. Without triton this fails; it does not skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    done = subprocess.run([sys.executable, "-m", "tests.unit.triton_check"], cwd=REPOSITORY, timeout=280, text=True,
                          env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_every_case_ran(found: dict[str, dict[str, float]]) -> None:
    assert len(found) == 2 * 3 * 2 * 2 * 2 + 1


def test_log_probs_and_entropy(found: dict[str, dict[str, float]]) -> None:
    wrong = {case: errors for case, errors in found.items()
             if max(errors.get("logprobs", 0), errors.get("entropy", 0), errors.get("statistics", 0)) > 2e-6}
    assert not wrong


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", 2**-6)])
def test_gradients(dtype: str, tolerance: float, found: dict[str, dict[str, float]]) -> None:
    cases = {case: errors for case, errors in found.items() if case.startswith(dtype)}
    assert len(cases) == 24
    assert not {case: errors for case, errors in cases.items()
                if max(errors["grad_hidden"], errors["grad_weight"]) > tolerance}
