"""Compiles every Triton kernel of the loss stage ahead of time for each supported architecture, without a GPU.

One row per kernel variant and architecture: registers per thread, spilled bytes, shared memory. The exit status is 1
when a variant spills or needs more shared memory than the smallest of the architectures offers, and the import fails
where torch was built without triton.

    python -m benchmarks.kernel_report [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter replaces the compiler at import

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from luspo_megatron.kernels import triton_rows  # noqa: E402

ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
SHARED_LIMIT = 227 * 1024  # bytes that one block can use on sm_90 and sm_100


@dataclass(frozen=True)
class Row:
    kernel: str
    variant: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def good(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes < SHARED_LIMIT


@dataclass(frozen=True)
class Variant:
    kernel: Any
    name: str
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int


def variants() -> Iterator[Variant]:
    """What the launchers of triton_rows can launch, in both cache dtypes."""
    for exps in ("bf16", "fp32"):
        for keep in (False, True):
            yield Variant(
                triton_rows.statistics_kernel, f"cache={exps if keep else 'no'}",
                {"logits_ptr": "*fp32", "column_ptr": "*i64", "state_ptr": "*fp32",
                 "exps_ptr": f"*{exps if keep else 'fp32'}", "reference_ptr": "*fp32", "num_rows": "i32",
                 "num_columns": "i32", "inv_temperature": "fp32", "KEEP": "constexpr", "BLOCK": "constexpr"},
                {"KEEP": keep, "BLOCK": triton_rows.STATISTICS_BLOCK}, triton_rows.STATISTICS_WARPS)
        for cached in (False, True):
            for entropy in (False, True):
                yield Variant(
                    triton_rows.gradient_kernel, f"out={exps} cached={cached} entropy={entropy}",
                    {"source_ptr": f"*{exps if cached else 'fp32'}", "index_ptr": "*i64", "column_ptr": "*i64",
                     "vectors_ptr": "*fp32", "out_ptr": f"*{exps}", "num_rows": "i32", "num_columns": "i32",
                     "inv_temperature": "fp32", "CACHED": "constexpr", "ENTROPY": "constexpr", "BLOCK": "constexpr"},
                    {"CACHED": cached, "ENTROPY": entropy, "BLOCK": triton_rows.GRADIENT_BLOCK},
                    triton_rows.GRADIENT_WARPS)


def assembler(capability: int) -> Path:
    """Triton's own ptxas; newer architectures may have one to themselves."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    special = folder / "ptxas-blackwell"
    return special if capability >= 100 and special.exists() else folder / "ptxas"


def compile_one(variant: Variant, capability: int) -> Row:
    kernel = variant.kernel
    names = kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in variant.signature.items()
               if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=variant.signature, constexprs=variant.constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                              options={"num_warps": variant.num_warps})
    architecture = ARCHITECTURES[capability]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        # the PTX names the plain architecture; the suffix chooses the same instructions that triton's launcher would
        path.write_text(re.sub(r"\.target sm_\w+", f".target {architecture}", compiled.asm["ptx"]))
        done = subprocess.run([str(assembler(capability)), "-v", f"--gpu-name={architecture}", str(path), "-o",
                               str(Path(folder) / "kernel.cubin")], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"ptxas on {kernel.__name__} ({variant.name}, {architecture}):\n{done.stderr}")
    return Row(kernel.__name__, variant.name, architecture, int(_found(r"Used (\d+) registers", done.stderr)),
               int(_found(r"(\d+) bytes spill stores", done.stderr))
               + int(_found(r"(\d+) bytes spill loads", done.stderr)), int(compiled.metadata.shared))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"ptxas did not print {pattern!r}:\n{text}")
    return match[1]


def report() -> list[Row]:
    seen: dict[tuple[str, str], Variant] = {(v.kernel.__name__, v.name): v for v in variants()}
    return [compile_one(variant, capability) for variant in seen.values() for capability in ARCHITECTURES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", help="also write the table to this file")
    args = parser.parse_args()
    rows = report()
    print(f"{'kernel':20} {'variant':36} {'arch':9} {'registers':>9} {'spill B':>8} {'shared B':>9}")
    for row in rows:
        print(f"{row.kernel:20} {row.variant:36} {row.architecture:9} {row.registers:9} {row.spill_bytes:8} "
              f"{row.shared_bytes:9}{'' if row.good else '   FAILS'}")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
