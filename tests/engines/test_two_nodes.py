"""An engine over two nodes: two supervisors on this machine, each with one of the engine's two tensor-parallel workers.

The parts meet over the loopback. Not covered: NCCL, two machines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luspo_megatron.rollout.engine import load_engine_kind
from tests.distributed.actor_jobs import Case
from tests.engines import jobs
from tests.engines.conftest import ROOT, Folders, settings
from tests.engines.models import MOST_TOKENS
from tests.engines.side import FleetHost
from tests.engines.test_push import TOLERANCE, next_version
from tests.workers import pool

FLAGS = {
    "vllm": ["--rollout.engine_args", " --nnodes 2 --tensor-parallel-size 2"],
    "sglang": ["--rollout.engine_args", " --nnodes 2 --tp-size 2",
               # SGLang on a CPU binds each worker to cores of its own.
               "--rollout.engine_env", f"SGLANG_CPU_OMP_THREADS_BIND=0|{os.cpu_count() - 1}"],  # type: ignore[operator]
}


class Node:
    """`luspo engines` as a process."""

    def __init__(self, number: int, engine: str, model: Path, folder: Path) -> None:
        config = settings(engine)
        self.output = folder / f"supervisor-{number}.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "luspo_megatron", "engines",
                 "--model.hf", str(model), "--model.dtype", "float32", "--run.dir", str(folder / "run"),
                 "--rollout.engine", engine, "--rollout.engine_python", config.engine_python,
                 "--rollout.num_engines", "1", "--rollout.start_timeout", "240",
                 "--data.max_prompt_tokens", "8", "--rollout.max_response_tokens", str(MOST_TOKENS - 8),
                 "--registry", str(folder / "registry"), "--node", str(number), "--nodes", "2", *FLAGS[engine]],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "LUSPO_PLATFORM": "cpu"})

    @property
    def said(self) -> str:
        return self.output.read_text()

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def nodes(engine: str, folders: Folders, tmp_path: Path) -> Iterator[list[Node]]:
    started = [Node(number, engine, folders.a, tmp_path) for number in (0, 1)]
    yield started
    for node in started:
        node.end()


def until(condition: Callable[[], bool], nodes: list[Node], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "\n\n".join(node.said for node in nodes)
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_weights_reach_both_nodes_and_a_dead_part_costs_time_only(engine: str, nodes: list[Node], folders: Folders,
                                                                  tmp_path: Path) -> None:
    host = FleetHost(settings(engine), load_engine_kind(engine), model=str(folders.a), dtype="float32",
                     folder=tmp_path / "run/logs", max_length=MOST_TOKENS, registry=tmp_path / "registry")
    try:
        host.start()
        assert host.fleet.num_workers == 2

        def push(*models: Path) -> list[list[list[int]]]:
            """Responses after a push of each."""
            version = next_version(host)
            results = pool(2).run(jobs.push_and_compare, Case(world=2, tp=2, ep=2), list(models), host.address, version)
            for number in range(len(models)):
                worst = max(result[number]["worst"] for result in results)
                assert worst <= TOLERANCE, f"push {number}: sampled and actor's log-probs differ by {worst}"
                assert results[0][number]["versions"] == {(version + number, version + number)}
            return [found["responses"] for found in results[0]]

        a, b, again = push(folders.a, folders.b, folders.a)
        assert a == again and a != b

        slot = host.fleet.slots[0]
        assert slot.process is not None
        before = slot.process.pid
        [part] = nodes[1].children()
        os.killpg(part, signal.SIGKILL)
        until(lambda: slot.ready and slot.process is not None and slot.process.pid != before, nodes)
        assert "part 1 of it, on node 1" in nodes[0].said
        assert push(folders.b) == [b]
    finally:
        host.close()
    for node in nodes:
        node.end()
        assert node.process.returncode == 0, node.said
