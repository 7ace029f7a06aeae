"""Every Triton kernel of the loss stage compiles for every architecture without a GPU, and spills nothing."""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ARCHITECTURES = {"sm_80", "sm_90a", "sm_100a"}


def kernels() -> set[str]:
    """Functions under @triton.jit anywhere in luspo_megatron, from the source."""
    found = set()
    for path in (REPOSITORY / "luspo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list
                                                         if "triton" in ast.unparse(d)):
                found.add(node.name)
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    path = tmp_path_factory.mktemp("report") / "kernels.csv"
    done = subprocess.run([sys.executable, "-m", "benchmarks.kernel_report", "--csv", str(path)], cwd=REPOSITORY,
                          env=ENVIRONMENT, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with open(path) as file:
        return list(csv.DictReader(file))


def test_one_row_per_kernel_and_architecture(rows: list[dict[str, str]]) -> None:
    assert len(kernels()) >= 2
    assert {row["kernel"] for row in rows} == kernels()
    for kernel in kernels():
        for variant in {row["variant"] for row in rows if row["kernel"] == kernel}:
            found = [row["architecture"] for row in rows if (row["kernel"], row["variant"]) == (kernel, variant)]
            assert sorted(found) == sorted(ARCHITECTURES)


def test_no_spills_and_little_shared_memory(rows: list[dict[str, str]]) -> None:
    for row in rows:
        assert int(row["spill_bytes"]) == 0 and int(row["shared_bytes"]) < 227 * 1024, row
        assert 16 <= int(row["registers"]) <= 255, row


@pytest.mark.parametrize("change", [{"spill_bytes": 4}, {"shared_bytes": 227 * 1024}])
def test_a_kernel_that_spills_fails_the_check(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import kernel_report

    good = {"kernel": "k", "variant": "v", "architecture": "sm_80", "registers": 32, "spill_bytes": 0,
            "shared_bytes": 16}
    monkeypatch.setattr(sys, "argv", ["kernel_report"])
    for row, status in ((good, 0), (good | change, 1)):
        monkeypatch.setattr(kernel_report, "report", lambda row=row: [kernel_report.Row(**row)])
        assert kernel_report.main() == status


def test_a_torch_without_triton_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = subprocess.run([sys.executable, "-m", "benchmarks.kernel_report"], cwd=REPOSITORY, capture_output=True,
                          env=ENVIRONMENT | {"PYTHONPATH": path}, text=True, timeout=120)
    assert done.returncode != 0 and "triton" in done.stderr
