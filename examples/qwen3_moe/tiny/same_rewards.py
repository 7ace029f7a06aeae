"""Rewards of the same task with different engines: a table, and exit code 1 where they differ by more than chance.

Each step draws 256 samples with rewards 0 or 1. The bound is four standard errors of the difference of two means over
the common steps, every reward taken for a coin toss of its own; same prompts in the same order make it smaller, and
runs that part company larger.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from luspo_megatron.report.metrics import METRICS_FILE
from luspo_megatron.report.records import read_lines

SAMPLES = 256  # of a step, tiny_cpu.yaml


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(folder / METRICS_FILE)[0] if "reward_mean" in row]


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return math.fsum(row[name] for row in rows) / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="holds one run folder for each engine")
    parser.add_argument("--engines", nargs="+", required=True, help="the first one is compared with")
    args = parser.parse_args()
    runs = {engine: steps_of(args.folder / engine) for engine in args.engines}
    steps = min(len(rows) for rows in runs.values())
    if not steps:
        sys.exit(f"{args.folder}: a run has no step yet")
    bound = 4 * math.sqrt(2 * 0.25 / (steps * SAMPLES))
    first, good = mean(runs[args.engines[0]][:steps], "reward_mean"), True
    print(f"{'engine':8} {'steps':>5} {'reward':>7} {'first 10':>8} {'last 10':>8} {'difference':>10}  "
          f"{'median log-prob difference':>26} {'rollout s':>9} {'sync s':>6}")
    for engine, rows in runs.items():
        rows = rows[:steps]
        difference = mean(rows, "reward_mean") - first
        good &= abs(difference) <= bound
        apart = sorted(row["logprob_max_diff"] for row in rows)[len(rows) // 2]
        print(f"{engine:8} {steps:5} {mean(rows, 'reward_mean'):7.4f} {mean(rows[:10], 'reward_mean'):8.4f} "
              f"{mean(rows[-10:], 'reward_mean'):8.4f} {difference:+10.4f}  {apart:26.1e} "
              f"{mean(rows, 'seconds/rollout'):9.2f} {mean(rows, 'seconds/sync'):6.2f}")
    print(f"rewards {'agree' if good else 'do NOT agree'} within {bound:.4f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
