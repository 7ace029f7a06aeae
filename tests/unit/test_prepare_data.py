"""tools/prepare_data on rows in each public format; GSM8K also on a real file where one is given."""

from __future__ import annotations

import json
import os
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


def test_real_gsm8k_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of the real file is kept, and its answer is the one behind the ####."""
    path = Path(os.environ.get("GSM8K") or Path(__file__).parents[3] / "shared/data/gsm8k.jsonl")
    if not path.is_file():
        pytest.skip(f"no {path}; name a file of GSM8K rows with GSM8K=FILE")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert main(["gsm8k", str(path), "--out", str(tmp_path / "out.jsonl")]) == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert f"{len(rows)} read, {len(rows)} written" in capsys.readouterr().out
    assert [float(row["answer"]) for row in written] == [
        float(row["answer"].split("####")[1].replace(",", "")) for row in rows]


@pytest.mark.parametrize(("kind", "row"), [
    ("dapo", {"prompt": "What is it?", "reward_model": {"ground_truth": "\\boxed{"}}),
    ("math", {"problem": "p", "answer": "\\boxed{"})])
def test_answers_that_do_not_grade_as_right_are_dropped_and_reported(
        tmp_path: Path, kind: str, row: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """field case: a reward that is 0 for every answer, the right ones too, and nothing says so."""
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    assert main([kind, str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 1
    said = capsys.readouterr()
    assert "too many answers do not grade as right" in said.err and "1 not graded as right" in said.out


def test_another_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the gsm8k format.*columns: problem, answer"):
        prepare(tmp_path, "gsm8k", [{"problem": "p", "answer": "1"}])
