#!/usr/bin/env python3
"""Public math data sets, as they are downloaded, to the prompt format: one JSON object a line, {"prompt", "answer"}.

    python tools/prepare_data/prepare.py dapo  dapo-math-17k.parquet  --out data/dapo-math-17k.jsonl
    python tools/prepare_data/prepare.py aime  aime_2024.parquet      --out data/aime24.jsonl
    python tools/prepare_data/prepare.py math  test.jsonl             --out data/math500.jsonl
    python tools/prepare_data/prepare.py gsm8k train.jsonl            --out data/gsm8k.jsonl

Files (.jsonl or .parquet) are local: nothing is downloaded. Repeated prompts (DAPO's file holds each about 100 times)
are dropped, and so are rows without an answer; every kept answer is graded against itself with the reward that training
uses, and rows that fail are dropped and counted. The exit code is 1 when more than 2% fail: the format is then another.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from luspo_megatron.config import RewardConfig
from luspo_megatron.data.records import plain, read_records
from luspo_megatron.errors import UserError
from luspo_megatron.reward.base import RewardInput
from luspo_megatron.reward.math import MathReward, gold_answer

INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
DAPO_HEAD = re.compile(r"^Solve the following math problem step by step\..*?\n\n", re.DOTALL)
DAPO_TAIL = re.compile(r'\n*Remember to put your answer on its own line after "Answer:"\.?\s*$')
TOLERATED = 0.02


def text_of(prompt: Any) -> str:
    """A prompt that is a text, or the user's turn of a chat list."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence):
        turns = [turn["content"] for turn in prompt if turn.get("role") == "user"]
        if turns:
            return str(turns[-1])
    raise UserError(f"a prompt is neither a text nor a chat with a user's turn: {str(prompt)[:80]!r}")


def dapo(row: Mapping[str, Any]) -> tuple[str, Any]:
    """DAPO-Math-17k: prompt [{role, content}] with an instruction around the problem, reward_model.ground_truth."""
    problem = DAPO_TAIL.sub("", DAPO_HEAD.sub("", text_of(row["prompt"])))
    answer = row["reward_model"]["ground_truth"] if "reward_model" in row else row["answer"]
    return problem, answer


def aime(row: Mapping[str, Any]) -> tuple[str, Any]:
    """AIME 2024 and 2025 in their usual forms: problem or question (or Problem), answer (or Answer), an integer."""
    answer = first(row, "answer", "Answer")
    text = str(answer).strip()
    # 033 is how the contest writes 33
    return text_of(first(row, "problem", "question", "Problem")), str(int(text)) if text.isdigit() else answer


def math(row: Mapping[str, Any]) -> tuple[str, Any]:
    """MATH500: problem, answer; or MATH: problem, a solution whose last box is the answer."""
    return text_of(row["problem"]), first(row, "answer", "solution")


def gsm8k(row: Mapping[str, Any]) -> tuple[str, Any]:
    """GSM8K: question, and a worked answer that ends in "#### 18"."""
    return text_of(row["question"]), row["answer"]


def first(row: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(names[0])


FORMATS = {"dapo": dapo, "aime": aime, "math": math, "gsm8k": gsm8k}


def convert(kind: str, path: str, instruction: str, counts: Counter[str]) -> Iterator[dict[str, str]]:
    """The rows to write; ``counts`` says what became of the others. Raises UserError for a file of another format."""
    reward = MathReward(RewardConfig())
    seen: set[str] = set()
    for record in read_records(path, "the file"):
        counts["read"] += 1
        row = plain(record.row)
        try:
            problem, answer = FORMATS[kind](row)
        except (KeyError, TypeError) as error:
            raise UserError(f"{record.where}: no column {error}; this is not the {kind} format (columns: "
                            f"{', '.join(row)})") from None
        prompt = problem.strip() + instruction
        if prompt in seen:
            counts["repeated"] += 1
            continue
        seen.add(prompt)
        gold = gold_answer(answer).replace("$", "").strip() if kind != "gsm8k" else gold_answer(answer).replace(",", "")
        if not gold or not problem.strip():
            counts["without an answer"] += 1
            continue
        graded = reward.score(RewardInput(prompt, f"\\boxed{{{gold}}}", {"answer": gold}))
        wrong = reward.score(RewardInput(prompt, "\\boxed{987654321}", {"answer": gold}))
        if graded != 1.0 or wrong != 0.0:
            counts["not graded as right"] += 1
            continue
        counts["written"] += 1
        yield {"prompt": prompt, "answer": gold}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(FORMATS))
    parser.add_argument("file", help="local .jsonl or .parquet file")
    parser.add_argument("--out", required=True, type=Path, help="the .jsonl file to write; it must not exist")
    parser.add_argument("--instruction", default=INSTRUCTION, help="put behind every problem")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise UserError(f"--out {args.out}: is there already; name another file")
    counts: Counter[str] = Counter()
    rows = list(convert(args.kind, args.file, args.instruction, counts))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{args.out}: " + ", ".join(f"{number} {what}" for what, number in counts.items()))
    distinct = counts["written"] + counts["not graded as right"] + counts["without an answer"]
    if not rows or counts["written"] < (1 - TOLERATED) * distinct:
        print("too many answers do not grade as right: is this the right format?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"prepare: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
