"""An engine server that is killed while it receives weights: noticed at once, the push is repeated, nobody waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from luspo_megatron.config import RolloutConfig
from luspo_megatron.rollout.engine import load_engine_kind
from tests.distributed.actor_jobs import Case
from tests.engines import jobs
from tests.engines.side import FleetHost
from tests.tiny import save_model
from tests.workers import pool


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("case", [Case(world=2, tp=2, ep=2), Case(world=2, pp=2)], ids=["tp2ep2", "pp2"])
def test_kill_9_in_the_middle_of_a_push(case: Case, engines: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "moe", layers=2)
    host = FleetHost(RolloutConfig(num_engines=engines, start_timeout=200.0), load_engine_kind("hf"), model=str(model),
                     dtype="float32", folder=tmp_path)
    host.start()
    killed: list[float] = []

    def kill() -> None:
        while host.events.count("update_weights") < 2:
            time.sleep(0.01)
        time.sleep(0.5)
        killed.append(time.monotonic())
        os.kill(host.fleet.slots[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]

    try:
        threading.Thread(target=kill, daemon=True).start()
        # so many buckets that a push takes seconds
        results = pool(2).run(jobs.push_and_compare, case, [model, model], host.address, 1, bucket_bytes=600)
        assert killed and time.monotonic() - killed[0] < 60, "the ranks waited for a dead engine"
        assert len(results[0][1]["warnings"]) == 1 and "was ended by SIGKILL" in results[0][1]["warnings"][0]
        assert results[0][1]["versions"] == {(2, 2)} and max(result[1]["worst"] for result in results) < 1e-5
    finally:
        host.close()
