"""A run folder takes one start at a time, however the ranks are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luspo_megatron import run
from luspo_megatron.config import Config
from luspo_megatron.folder_lock import alone_in

HOLDER = """
import sys, time
from luspo_megatron.folder_lock import alone_in
with alone_in(sys.argv[1], 0.0):
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process at work in tmp_path/run."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def never(config: Any) -> None:
    raise AssertionError("the run folder is not free")


def test_a_second_start_ends_with_the_name_of_the_first(holder: subprocess.Popen[str], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "LOCK_PATIENCE", 0.0)
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    with pytest.raises(run.UserError, match=f"process {holder.pid} on .*--run.dir of its own"):
        run.start("no.such.module", Config(), str(tmp_path / "run"), 2, never, lambda config: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert run.start("no.such.module", Config(), str(tmp_path / "run"), 2, never, never) == 2
    assert f"process {holder.pid} on" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # one of its own ranks, not a second start
    seen: list[Any] = []
    assert run.start("no.such.module", Config(), str(tmp_path / "run"), 2, seen.append, never) == 0 and len(seen) == 1
    assert [path.name for path in (tmp_path / "run/logs").iterdir()] == ["lock"]


def test_a_start_that_was_killed_is_not_there_any_more(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    with alone_in(tmp_path / "run", 5.0):
        assert f"process {os.getpid()} on" in (tmp_path / "run/logs/lock").read_text()


def test_the_end_of_the_first_is_waited_for(tmp_path: Path) -> None:
    short = HOLDER.replace("600", "1")
    with subprocess.Popen([sys.executable, "-c", short, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        began = time.monotonic()
        with alone_in(tmp_path, 60.0):
            assert 0.5 < time.monotonic() - began < 30
