"""Time and memory of the loss stage against naive log_softmax with autograd and against Liger's LUSPO, on this CPU.

One LUSPO loss and its gradients of hidden and weight (benchmarks/loss_cases.py), float32, each contender in turn,
round after round in one process. Times are CPU seconds of all threads (`time.process_time`), the median of the rounds.
Threads that wait for each other sleep (OMP_WAIT_POLICY=passive): by default they spin, which counts as CPU seconds,
falls most on contenders of many small operations, and grows with the load of the machine; OMP_WAIT_POLICY=active in
the environment measures that. Peak memory is what is resident above the inputs, gradients included, of one pass in a
process of its own. The last line is JSON with every ratio, its target, and where it was measured; the exit status is 1
when a target is missed.

    make bench-loss            needs Linux and liger-kernel, the extra `bench` of setup.py
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch's thread pool starts

import torch  # noqa: E402

from benchmarks.here import commit, machine  # noqa: E402
from benchmarks.loss_cases import CONTENDERS, Problem, make_problem, one_pass  # noqa: E402
from benchmarks.memory import in_new_process  # noqa: E402

OURS = ("recompute", "default", "cache")


@dataclass(frozen=True)
class Run:
    """Of one contender: median and all CPU seconds of a pass, and its peak memory (None: not asked)."""

    contender: str
    cpu_s: float
    peak_bytes: int | None
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    name: str
    value: float
    target: float

    @property
    def good(self) -> bool:
        return self.value <= self.target


def cpu_seconds(problems: dict[str, tuple[str, Problem]], rounds: int) -> dict[str, tuple[float, ...]]:
    """{label: CPU seconds of each round} of {label: (contender, problem)}, interleaved, after one round unmeasured."""
    found: dict[str, list[float]] = {label: [] for label in problems}
    for turn in range(rounds + 1):
        for label, (contender, problem) in problems.items():
            start = time.process_time()
            one_pass(contender, problem)
            if turn:
                found[label].append(time.process_time() - start)
    return {label: tuple(times) for label, times in found.items()}


def check_same(problem: Problem, contenders: list[str], tolerance: float = 1e-4) -> None:
    """Every contender computes the same loss and gradients, relative to their largest element."""
    want = one_pass("naive", problem)
    for name in contenders:
        for what, a, b in zip(("loss", "d hidden", "d weight"), one_pass(name, problem), want, strict=True):
            error = float((a - b).abs().max() / b.abs().max())
            if not error <= tolerance or float(b.abs().max()) < 1e-6:
                raise RuntimeError(f"{name}: {what} is off by {error:.1e} of its largest element")


def measure(args: argparse.Namespace) -> tuple[list[Run], list[Ratio]]:
    sizes = {"tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab}
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    # memory first: this process then holds nothing
    peaks = {name: int(in_new_process("benchmarks.loss_cases", name, "--threads", str(args.threads), *flags))
             for name in CONTENDERS}
    torch.set_num_threads(args.threads)
    check_same(make_problem(200, 64, 1024), [*CONTENDERS])
    busy = make_problem(**sizes)
    idle = make_problem(**sizes, idle=True)
    problems = {name: (name, busy) for name in CONTENDERS} | {f"{name}, 40% idle": (name, idle) for name in OURS}
    times = cpu_seconds(problems, args.rounds)
    runs = [Run(label, statistics.median(found), peaks.get(label), found) for label, found in times.items()]
    return runs, ratios({run.contender: run.cpu_s for run in runs}, peaks)


def ratios(cpu: dict[str, float], peaks: dict[str, int]) -> list[Ratio]:
    """The project's targets."""
    out = []
    for name, most_time, most_memory in (("recompute", 1.3, 1 / 7), ("default", 1.3, 1 / 7), ("cache", 1.0, 1 / 3)):
        out.append(Ratio(f"{name} / naive, time", cpu[name] / cpu["naive"], most_time))
        out.append(Ratio(f"{name} / naive, memory", peaks[name] / peaks["naive"], most_memory))
        out.append(Ratio(f"{name} / liger, time", cpu[name] / cpu["liger"], 0.65))
    for name, most in (("recompute", 0.80), ("default", 0.80), ("cache", 0.88)):
        out.append(Ratio(f"{name}, 40% of rows idle / all active, time", cpu[f"{name}, 40% idle"] / cpu[name], most))
    return out


def write_csv(path: str, runs: list[Run]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["contender", "cpu_s", "peak_bytes", *(f"round_{i + 1}" for i in range(len(runs[0].rounds)))])
        for run in runs:
            writer.writerow([run.contender, f"{run.cpu_s:.3f}", run.peak_bytes or "",
                             *(f"{t:.3f}" for t in run.rounds)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", help="write every round to this file")
    args = parser.parse_args()
    load, measured = os.getloadavg()[0], commit()
    runs, found = measure(args)
    print(f"{'contender':24} {'CPU s':>7} {'peak MB':>8}   rounds")
    for run in runs:
        peak = "" if run.peak_bytes is None else f"{run.peak_bytes / 1e6:.0f}"
        print(f"{run.contender:24} {run.cpu_s:7.3f} {peak:>8}   {' '.join(f'{t:.2f}' for t in run.rounds)}")
    print("")
    for ratio in found:
        print(f"{ratio.name:44} {ratio.value:6.3f} <= {ratio.target:.3f}{'' if ratio.good else '   MISSED'}")
    if args.csv:
        write_csv(args.csv, runs)
    print(json.dumps({
        "ratios": {ratio.name: asdict(ratio) | {"met": ratio.good} for ratio in found},
        "cpu_s": {run.contender: round(run.cpu_s, 4) for run in runs},
        "peak_bytes": {run.contender: run.peak_bytes for run in runs if run.peak_bytes is not None},
        "sizes": {"tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab, "threads": args.threads,
                  "rounds": args.rounds},
        "machine": machine(), "wait_policy": os.environ["OMP_WAIT_POLICY"],
        "load_average_at_start": load, "commit": measured,
    }))
    return 0 if all(ratio.good for ratio in found) else 1


if __name__ == "__main__":
    sys.exit(main())
