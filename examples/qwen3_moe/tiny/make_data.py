"""Data of the tiny demo: noisy demonstrations, training prompts and held-out prompts of reasoning-gym's chain_sum.

Sums of 2 to 4 one-digit terms, as a bare expression: ``4+7-2=``. A demonstration is ``>9`` or, half of the time, with
the partial sums before it, ``<11<9>9``; in 40% the final answer is off by 1 or 2. So the cold start learns the form and
some arithmetic, and a verifiable reward can clean the rest up.

There are 200 + 4,000 + 80,000 such expressions. Each belongs to one of three parts by a digest of its text, whatever
the seed: 20% held out, 40% demonstrations, 40% training. So no seed's model has seen another seed's held-out prompts,
and the training prompts are fresh too. Training and held-out prompts are distinct; demonstrations recur with new noise.

    python examples/qwen3_moe/tiny/make_data.py --out runs/tiny-data --seed 0

writes demos.jsonl (prompt, response), train.jsonl and heldout.jsonl (prompt, answer and the reasoning-gym entry).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import reasoning_gym

TASK = "chain_sum"
TASK_ARGS = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}
WRONG_FRACTION = 0.4
PARTIAL_SUMS_FRACTION = 0.5
CHUNK = 20_000


def part_of(prompt: str) -> str:
    """The part that a prompt belongs to, for every seed the same."""
    tenth = hashlib.blake2b(prompt.encode(), digest_size=4).digest()[0] * 10 // 256
    return "heldout" if tenth < 2 else "demos" if tenth < 6 else "train"


def stream(part: str, seed: int) -> Iterator[dict[str, Any]]:
    """Endless rows of one part, with repetitions, as chain_sum draws them (each number of terms equally often)."""
    for chunk in itertools.count():
        # Item i of a task has the seed `seed + i`: a digest keeps the chunks and the seeds apart.
        key = f"{part}:{seed}:{chunk}".encode()
        task_seed = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest())
        dataset = reasoning_gym.create_dataset(TASK, size=CHUNK, seed=task_seed, **TASK_ARGS)
        for entry in dataset:
            prompt = entry["metadata"]["expression"].replace(" ", "") + "="
            if part_of(prompt) == part:
                yield {"prompt": prompt, **entry, "task": TASK, "task_args": TASK_ARGS}


def distinct(rows: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first ``count`` rows whose prompt has not come before."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["prompt"], row)
        if len(found) == count:
            break
    return list(found.values())


def partial_sums(prompt: str) -> str:
    """``4+7-2=`` -> ``<11<9``"""
    terms = [int(term) for term in re.findall(r"[+-]?\d+", prompt)]
    return "".join(f"<{total}" for total in itertools.accumulate(terms))[len(f"<{terms[0]}") :]


def demonstration(prompt: str, answer: str, draw: random.Random) -> str:
    """A response in the demo's form; the partial sums are right even where the answer is wrong."""
    shown = int(answer) + draw.choice([-2, -1, 1, 2]) if draw.random() < WRONG_FRACTION else int(answer)
    return (partial_sums(prompt) if draw.random() < PARTIAL_SUMS_FRACTION else "") + f">{shown}"


def make_data(out: Path, seed: int, demos: int, train: int, heldout: int) -> dict[str, int]:
    """Write the three files; gives the number of rows of each and of distinct prompts in the demonstrations."""
    draw = random.Random(seed)
    demo_rows = [
        {"prompt": row["prompt"], "response": demonstration(row["prompt"], row["answer"], draw)}
        for row in itertools.islice(stream("demos", seed), demos)
    ]
    train_rows = distinct(stream("train", seed), train)
    heldout_rows = distinct(stream("heldout", seed), heldout)
    for rows in (train_rows, heldout_rows):
        draw.shuffle(rows)  # the few short sums are drawn early: the first rows would be easier than the rest
    seen = {row["prompt"] for row in (*demo_rows, *train_rows)}
    assert not seen & {row["prompt"] for row in heldout_rows}, "a held-out prompt is among those trained on"
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("demos", demo_rows), ("train", train_rows), ("heldout", heldout_rows)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    distinct_demos = len({row["prompt"] for row in demo_rows})
    return {"demos": demos, "distinct_demos": distinct_demos, "train": len(train_rows), "heldout": len(heldout_rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the files to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--demos", type=int, default=24_000, help="demonstrations (default 24000)")
    parser.add_argument("--train", type=int, default=4_800, help="distinct training prompts (default 150 x 32)")
    parser.add_argument("--heldout", type=int, default=1_000, help="distinct held-out prompts (default 1000)")
    arguments = parser.parse_args()
    if arguments.train > 20_000 or arguments.heldout > 10_000:
        parser.error("there are about 33,000 distinct training and 16,000 held-out prompts; ask for fewer")
    counts = make_data(arguments.out, arguments.seed, arguments.demos, arguments.train, arguments.heldout)
    print(f"{arguments.out}: " + ", ".join(f"{value:,} {name}" for name, value in counts.items()))


if __name__ == "__main__":
    main()
