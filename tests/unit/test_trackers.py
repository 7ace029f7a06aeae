"""Weights & Biases (its own files read back) and the Prometheus endpoint (asked over HTTP)."""

from __future__ import annotations

import json
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luspo_megatron.errors import UserError
from luspo_megatron.report.metrics import MetricSinks
from luspo_megatron.report.trackers import Prometheus, WandB


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_prometheus_reads_the_newest_step(tmp_path: Path, port: int) -> None:
    with MetricSinks(tmp_path, tensorboard=False, trackers=[Prometheus("127.0.0.1", port)]) as sinks:
        sinks.write(1, {"reward_mean": 0.25, "seconds/train": 2.0, "note": "text"})
        assert scrape(port) == {"luspo_reward_mean": 0.25, "luspo_seconds_train": 2.0, "luspo_step": 1}
        sinks.write(2, {"reward_mean": 0.5, "gradient_norm": float("nan")})
        assert scrape(port) == {"luspo_reward_mean": 0.5, "luspo_seconds_train": 2.0, "luspo_step": 2}
    with pytest.raises(OSError):
        scrape(port)  # closed with the run


def test_a_port_in_use_is_named(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*Address already in use.*--run.prometheus_port"):
            Prometheus("127.0.0.1", port)


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind W&B's seven-byte head: blocks of 32 KiB, chunks of (crc, length, type)."""
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            yield record
            record = b""


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """The history of an offline run that has finished; W&B's process writes its last lines a moment later."""
    from wandb.proto import wandb_internal_pb2

    records: list[Any] = []
    deadline = time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in records):
        assert time.monotonic() < deadline, "W&B did not finish its file"
        time.sleep(0.1)
        records = [wandb_internal_pb2.Record.FromString(data) for data in log_records(file.read_bytes())]
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                     for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def test_wandb_offline_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    run = tmp_path / "run"
    run.mkdir()
    config = {"optimizer": {"lr": 1e-6}}
    with MetricSinks(run, tensorboard=False, trackers=[WandB(run, "offline", "luspo", config, None)]) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"reward_mean": step / 4, "seconds/train": 1.5})
    name = (run / "wandb_id").read_text()
    with MetricSinks(run, tensorboard=False, resume_step=2,
                     trackers=[WandB(run, "offline", "luspo", config, 2)]) as sinks:
        sinks.write(3, {"reward_mean": 9.0})
    assert (run / "wandb_id").read_text() == name  # the same W&B run
    files = sorted((run / "wandb").glob(f"offline-run-*/run-{name.strip()}.wandb"))
    assert len(files) == 2
    assert wandb_rows(files[0]) == [{"step": s, "reward_mean": s / 4, "seconds/train": 1.5} for s in (1, 2, 3)]
    assert wandb_rows(files[1]) == [{"step": 3, "reward_mean": 9.0}]
