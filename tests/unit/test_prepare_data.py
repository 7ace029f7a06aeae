"""tools/prepare_data on rows in each public format; GSM8K also on a real file where one is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luspo_megatron.errors import UserError
from tools.prepare_data.prepare import INSTRUCTION, main

DAPO = ("Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on "
        'its own line after "Answer:".')


def prepare(tmp_path: Path, kind: str, rows: list[dict[str, Any]], parquet: bool = False) -> list[dict[str, str]]:
    source = tmp_path / ("in.parquet" if parquet else "in.jsonl")
    if parquet:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([kind, str(source), "--out", str(tmp_path / "out.jsonl")]) == 0
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("parquet", [False, True])
def test_dapo(tmp_path: Path, parquet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": [{"role": "user", "content": DAPO.format("What is $6 \\cdot 7$?")}],
           "reward_model": {"ground_truth": "42", "style": "rule"}}
    assert prepare(tmp_path, "dapo", [row, row, row], parquet) == [
        {"prompt": "What is $6 \\cdot 7$?" + INSTRUCTION, "answer": "42"}]
    assert "3 read, 1 written, 2 repeated" in capsys.readouterr().out


@pytest.mark.parametrize("row", [{"problem": "p", "answer": "033", "solution": "s"}, {"question": "p", "answer": 33},
                                 {"Problem": "p", "Answer": "33"}])
def test_aime(tmp_path: Path, row: dict[str, Any]) -> None:
    assert prepare(tmp_path, "aime", [row]) == [{"prompt": "p" + INSTRUCTION, "answer": "33"}]


def test_math(tmp_path: Path) -> None:
    rows = [{"problem": "a", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "solution": "."},
            {"problem": "b", "solution": "so it is $\\boxed{\\frac{1}{2}}$."}]
    assert [row["answer"] for row in prepare(tmp_path, "math", rows)] == [
        "\\left( 3, \\frac{\\pi}{2} \\right)", "\\frac{1}{2}"]


def test_gsm8k(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "A <<1+1=2>>2 thousand.\n#### 2,000"}, {"question": "q", "answer": ""}]
    rows += [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(60)]
    found = prepare(tmp_path, "gsm8k", rows)
    assert found[0] == {"prompt": "How many?" + INSTRUCTION, "answer": "2000"} and len(found) == 61


def test_another_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the gsm8k format.*columns: problem, answer"):
        prepare(tmp_path, "gsm8k", [{"problem": "p", "answer": "1"}])
