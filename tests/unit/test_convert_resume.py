"""kill -9 at random moments, then --resume: the same bytes as without an interruption, and no result before the end."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luspo_megatron.convert import to_megatron as to_megatron_module
from luspo_megatron.convert.to_hf import convert as to_hf
from luspo_megatron.convert.to_megatron import Layout, convert
from luspo_megatron.convert.workspace import Workspace
from luspo_megatron.errors import UserError
from tests.convert_helpers import contents, make_hf

KILLS = 10
LAYOUT = Layout(pp=2, ep=2)


def to_m(source: Path, out: Path, resume: bool) -> Any:
    return convert(source, out, LAYOUT, workers=2, resume=resume, quiet=True)


def to_h(source: Path, out: Path, resume: bool) -> Any:
    return to_hf(source, out, shard_bytes=100_000, workers=2, resume=resume, quiet=True)


def in_group(function: Callable[..., Any], *args: Any) -> None:
    os.setpgid(0, 0)
    function(*args)


def start(function: Callable[..., Any], *args: Any) -> Any:
    process = mp.get_context("fork").Process(target=in_group, args=(function, *args))
    process.start()
    return process


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_killed_and_resumed(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_megatron_module, "SMALLEST_FILE", 100_000)
    source, function = make_hf(tmp_path / "hf", "moe", files=2, num_hidden_layers=2), to_m
    if way == "to_hf":
        convert(source, tmp_path / "m", LAYOUT, workers=2, quiet=True)
        source, function = tmp_path / "m", to_h
    out = tmp_path / "out"  # the same name each time: state.json holds it
    began = time.monotonic()
    function(source, out, False)
    seconds = time.monotonic() - began
    want = contents(out)
    rng = random.Random(0)
    midway = 0
    for _ in range(KILLS):
        os.rename(out, tmp_path / f"old{time.monotonic_ns()}")
        process = start(function, source, out, False)
        time.sleep(rng.uniform(0, seconds))
        os.kill(process.pid, signal.SIGKILL)  # only the parent: its workers must end by themselves
        process.join()
        if not out.exists():
            midway += len(list((tmp_path / "out.partial/work").glob("*.json"))) > 1  # more than the plan
            function(source, out, (tmp_path / "out.partial").exists())
        assert contents(out) == want
        assert not (tmp_path / "out.partial").exists() or function(source, out, True) is not None
        assert not (tmp_path / "out.partial").exists()
    print(f"{midway} of {KILLS} kills came between the first recorded part and the end")


def test_resume_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts recorded before the interruption are not written again; other options or another source are refused."""
    monkeypatch.setattr(to_megatron_module, "SMALLEST_FILE", 100_000)
    hf, out = make_hf(tmp_path / "hf", "moe"), tmp_path / "out"
    record = Workspace.record
    done: dict[str, int] = {}

    def interrupted(space: Workspace, part: str, data: Any) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        record(space, part, data)
        done[part] = (space.out / "dist" / part).stat().st_mtime_ns

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            to_m(hf, out, False)
    assert not out.exists()
    with pytest.raises(UserError, match="changed: layout"):
        convert(hf, out, Layout(), resume=True, quiet=True)
    summary = to_m(hf, out, True)
    assert summary.resumed_parts == 3 < summary.parts
    assert {part: (out / "dist" / part).stat().st_mtime_ns for part in done} == done
    assert to_m(hf, out, True).parts == 0  # nothing is left to do


def test_a_changed_source_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    space = Workspace(out, {"files": [["a", 1, 2]]}, resume=False)
    with pytest.raises(UserError, match="another conversion is writing"):
        Workspace(out, {"files": [["a", 1, 2]]}, resume=True)
    space.close()
    with pytest.raises(UserError, match="changed: files"):
        Workspace(out, {"files": [["a", 1, 3]]}, resume=True)
    assert json.loads((tmp_path / "out.partial/work/plan.json").read_text()) == {"files": [["a", 1, 2]]}
