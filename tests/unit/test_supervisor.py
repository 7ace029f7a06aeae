"""`luspo engines` with engine doubles that are real processes, and a run's fleet that finds them by the registry."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_engine import KIND
from stub_engine import __file__ as STUB

from luspo_megatron.config import RolloutConfig
from luspo_megatron.config_tools import EnginesConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import GenerateRequest, load_engine_kind
from luspo_megatron.rollout.fleet import Fleet
from luspo_megatron.rollout.registry import BEAT_SECONDS, Beats
from luspo_megatron.rollout.supervisor import place_of, share_of

REQUEST = GenerateRequest([[3, 4], [5]], [10, 11], 1.0, 1.0, 8, [1])


class Node:
    """`luspo engines` as a process."""

    def __init__(self, folder: Path, *flags: str, module: str = "luspo_megatron", **environment: str) -> None:
        self.registry = folder / "registry"
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
        self.output = folder / f"supervisor-{time.monotonic_ns()}.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "engines", "--rollout.engine", "stub_engine:KIND",
                 "--model.hf", str(model), "--run.dir", str(folder / "run"), "--registry", str(self.registry),
                 "--rollout.start_timeout", "30", *flags],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, **environment})

    @property
    def said(self) -> str:
        return self.output.read_text()

    def record(self, node: int = 0) -> dict[str, Any]:
        path = self.registry / f"node-{node}.json"
        return json.loads(path.read_text()) if path.exists() else {"engines": []}

    def wait_serving(self, count: int, node: int = 0) -> list[dict[str, Any]]:
        self.until(lambda: [e["state"] for e in self.record(node)["engines"]] == ["serving"] * count)
        return self.record(node)["engines"]

    def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said
            time.sleep(0.05)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(*flags: str, module: str = "luspo_megatron", **environment: str) -> Node:
        nodes.append(Node(tmp_path, *flags, module=module, **environment))
        return nodes[-1]

    yield make
    for node in nodes:
        node.end()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def with_fleet(registry: Path, body: Callable[[Fleet], Any], engines: int = 2, timeout: float = 30.0) -> None:
    config = RolloutConfig(num_engines=engines, start_timeout=timeout, request_timeout=20.0)

    async def run() -> None:
        fleet = Fleet(config, KIND, model="none", dtype="float32", folder=registry.parent, registry=registry)
        await fleet.start()
        try:
            await body(fleet)
        finally:
            await fleet.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


# ---- pure -----------------------------------------------------------------------------------------------------------

def test_the_engines_are_divided_over_the_nodes() -> None:
    assert [list(share_of(5, node, 2)) for node in range(2)] == [[0, 1, 2], [3, 4]]
    assert [list(share_of(4, node, 4)) for node in range(4)] == [[0], [1], [2], [3]]
    with pytest.raises(UserError, match="leaves some of 3 engine nodes without an engine"):
        share_of(2, 0, 3)
    with pytest.raises(UserError, match="--node 2: take 0 to 1"):
        share_of(4, 2, 2)


def test_engines_over_several_nodes_take_nodes_in_a_row() -> None:
    assert [list(share_of(3, node, 4, span=2)) for node in range(4)] == [[0, 1], [0, 1], [2], [2]]
    with pytest.raises(UserError, match="engines over 2 nodes each cannot share 3 engine nodes"):
        share_of(2, 0, 3, span=2)
    with pytest.raises(UserError, match="leaves some of 4 engine nodes without an engine; take at least 2"):
        share_of(1, 0, 4, span=2)


def test_a_task_of_a_slurm_step_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert place_of(EnginesConfig()) == (0, 1)
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert place_of(EnginesConfig()) == (2, 3)
    assert place_of(EnginesConfig(node=1, nodes=2)) == (1, 2)


def test_only_a_beat_that_changes_is_alive() -> None:
    beats = Beats(0.2)
    assert not beats.alive("a", ("x", 1)) and not beats.alive("a", ("x", 1))  # what a dead one left behind
    assert beats.alive("a", ("x", 2)) and beats.alive("a", ("x", 2))
    time.sleep(0.3)
    assert not beats.alive("a", ("x", 2))
    assert beats.alive("a", ("y", 1)) and not beats.alive("a", None) and not beats.alive("a", ("y", 1))


# ---- as processes ---------------------------------------------------------------------------------------------------

@pytest.mark.timeout(120)
def test_a_run_finds_its_engines_and_survives_their_deaths(start: Callable[..., Node]) -> None:
    node = start("--rollout.num_engines", "2")

    async def body(fleet: Fleet) -> None:
        assert len(await fleet.generate(REQUEST)) == 2
        engines = node.record()["engines"]
        assert (node.registry / "node-0.json").stat().st_mode & 0o777 == 0o600
        assert [e["index"] for e in engines] == [0, 1] and len({e["url"] for e in engines}) == 2
        os.kill(engines[0]["pid"], signal.SIGKILL)
        assert len(await fleet.generate(REQUEST)) == 2
        await until(lambda: not fleet.slots[0].ready)
        await until(lambda: fleet.slots[0].ready)
        assert fleet.counts["engine_restarts"] == 1
        assert node.record()["engines"][0]["pid"] != engines[0]["pid"]
        assert sorted(path.name for path in (node.registry.parent / "run/logs").glob("*")) == [
            "engine-0.1.log", "engine-0.log", "engine-1.log"]
        await fleet.connect_weights("127.0.0.1", 1, 0, (0,), 3, 5.0)
        await fleet.update_weights({"version": 7, "buckets": []})
        # an engine that the run finds silent is ended by its supervisor, at the run's wish
        pid = fleet.slots[1].process.pid  # type: ignore[union-attr]
        fleet.slots[1].process.stop()  # type: ignore[union-attr]
        await until(lambda: fleet.slots[1].ready and fleet.slots[1].process.pid != pid)  # type: ignore[union-attr]
        assert gone([pid]) and fleet.slots[1].weight_version == 0 and fleet.slots[0].weight_version == 7

    with_fleet(node.registry, body)
    pids = [e["pid"] for e in node.wait_serving(2)]

    async def fresh(fleet: Fleet) -> None:  # the run before has left version 7 on engine 0: it is not for this run
        assert [slot.weight_version for slot in fleet.slots] == [0, 0]
        assert [slot.process.pid == pid for slot, pid in zip(fleet.slots, pids, strict=True)] == [  # type: ignore[union-attr]
            False, True]
        pids[0] = fleet.slots[0].process.pid  # type: ignore[union-attr]

    with_fleet(node.registry, fresh)
    node.process.terminate()
    assert node.process.wait(20) == 0, node.said
    assert gone(pids, 0.0) and not list(node.registry.glob("*.json"))


@pytest.mark.timeout(120)
def test_two_nodes_and_a_run_that_waits_for_both(start: Callable[..., Node]) -> None:
    flags = ("--rollout.num_engines", "3", "--nodes", "2")
    first = start(*flags, "--node", "0")
    first.wait_serving(2)
    second = start(*flags, "--node", "1")

    async def body(fleet: Fleet) -> None:
        assert [slot.name for slot in fleet.slots] == ["engine-0", "engine-1", "engine-2"]
        assert fleet.num_workers == 3

    with_fleet(first.registry, body, engines=3)
    assert [e["index"] for e in second.wait_serving(1, node=1)] == [2]
    twice = start(*flags, "--node", "1")
    assert twice.process.wait(30) == 2 and "node 1 has a supervisor already" in twice.said
    pids = [e["pid"] for n, count in ((0, 2), (1, 1)) for e in first.wait_serving(count, n)]
    first.process.kill()  # its engines end by themselves
    assert gone(pids[:2]) and not gone(pids[2:], 0.0)


@pytest.mark.timeout(60)
def test_sigterm_lets_a_run_finish_and_a_second_one_does_not_wait(start: Callable[..., Node]) -> None:
    node = start("--rollout.num_engines", "1", "--launch.stop_grace", "60")

    async def body(fleet: Fleet) -> None:
        await asyncio.sleep(3 * BEAT_SECONDS)
        node.process.terminate()
        await asyncio.sleep(3 * BEAT_SECONDS)
        assert len(await fleet.generate(REQUEST)) == 2
        node.process.terminate()
        await until(lambda: node.process.poll() == 0)

    with_fleet(node.registry, body, engines=1)
    assert "gets up to 60 s to finish first" in node.said


@pytest.mark.timeout(60)
def test_sigterm_during_the_start(start: Callable[..., Node]) -> None:
    node = start("--rollout.num_engines", "1", STUB_SLOW_START="60")
    node.until(lambda: bool(node.record()["engines"]) and node.record()["engines"][0]["pid"] > 0)
    pid = node.record()["engines"][0]["pid"]
    node.process.terminate()
    assert node.process.wait(20) == 0, node.said
    assert gone([pid], 0.0)


@pytest.mark.timeout(120)
def test_engines_that_share_the_trainers_memory_start_when_it_is_handed_over(start: Callable[..., Node]) -> None:
    node = start("--rollout.num_engines", "1", "--rollout.hand_over", "on")
    node.until(lambda: "engines start when a run has handed its memory over" in node.said)
    time.sleep(3 * BEAT_SECONDS)
    assert [(e["state"], e["pid"]) for e in node.record()["engines"]] == [("starting", 0)]

    async def body(fleet: Fleet) -> None:
        assert len(await fleet.generate(REQUEST)) == 2
        await fleet.sleep()
        [dead] = node.record()["engines"]
        os.kill(dead["pid"], signal.SIGKILL)
        await until(lambda: not fleet.slots[0].ready)
        await asyncio.sleep(3 * BEAT_SECONDS)  # the memory is the trainer's
        assert [e["state"] for e in node.record()["engines"]] == ["starting"]
        assert "is started again" not in node.said
        await fleet.wake("weights")
        assert fleet.slots[0].ready and fleet.slots[0].process.pid != dead["pid"]  # type: ignore[union-attr]

    with_fleet(node.registry, body, engines=1)
    node.process.terminate()
    assert node.process.wait(20) == 0, node.said


@pytest.mark.timeout(60)
def test_engines_that_cannot_start_are_told_to_the_run(start: Callable[..., Node]) -> None:
    node = start("--rollout.num_engines", "1", STUB_START_FAIL="3")
    assert node.process.wait(30) == 1
    assert "engine-0 could not start" in node.said and "told not to start" in node.said
    assert "Traceback" not in node.said
    assert node.record()["engines"][0]["state"] == "lost"

    async def nothing(fleet: Fleet) -> None:
        raise AssertionError("the fleet started")

    with pytest.raises(RunError, match=r"no living supervisor has it; is `luspo engines` running"):
        with_fleet(node.registry, nothing, engines=1, timeout=3.0)


@pytest.mark.timeout(60)
def test_bad_flags_are_exit_code_2(start: Callable[..., Node]) -> None:
    node = start("--rollout.num_engines", "1", STUB_START_FAIL="2")
    assert node.process.wait(30) == 2 and "told not to start" in node.said
    node = start("--rollout.num_engines", "1", "--rollout.urls", "http://127.0.0.1:1")
    assert node.process.wait(30) == 2 and "these engines run already" in node.said


@pytest.mark.timeout(120)
def test_an_engine_that_keeps_dying_is_given_up(start: Callable[..., Node]) -> None:
    node = start("--rollout.num_engines", "1", STUB_DIE_AFTER="0.3")

    async def body(fleet: Fleet) -> None:
        while True:
            await fleet.generate(REQUEST)

    with pytest.raises(RunError, match="no engine is left|engine-0 (is lost|could not start)"):
        with_fleet(node.registry, body, engines=1)
    assert node.process.wait(60) == 1
    assert "no engine of this node is left" in node.said and "started again 3 times" in node.said


# ---- engines over two nodes -----------------------------------------------------------------------------------------

def parts_of(run: Path, engine: int) -> dict[str, str]:
    """{log of a part: what it said}"""
    logs = sorted((run / "logs").glob(f"engine-{engine}-part-*.log"), key=lambda path: path.stat().st_mtime_ns)
    return {path.name: path.read_text() for path in logs}


@pytest.mark.timeout(180)
def test_an_engine_over_two_nodes_lives_and_dies_as_one(start: Callable[..., Node]) -> None:
    flags = ("--rollout.num_engines", "2", "--rollout.engine_args", " --nnodes 2 --tp 2", "--nodes", "2")
    second = start(*flags, "--node", "1", module="stub_engine")
    second.until(lambda: "part 1 of each engine; part 0 is node 0's" in second.said)
    first = start(*flags, "--node", "0", module="stub_engine")
    run = first.registry.parent / "run"

    def ends_of_parts() -> list[int]:
        """Process ids of the parts that run, by engine."""
        found = []
        for pid in Path("/proc").glob("[0-9]*"):
            words = (pid / "cmdline").read_bytes().split(b"\0") if (pid / "cmdline").exists() else []
            if str(STUB).encode() in words and words[-3:-1] == [b"1", b"2"] and is_running(int(pid.name)):
                found.append((words[-4], int(pid.name)))
        order = [engine["rendezvous"].encode() for engine in first.record()["engines"]]
        return [dict(found)[place] for place in order]

    async def body(fleet: Fleet) -> None:
        assert len(await fleet.generate(REQUEST)) == 2
        before = {log: said for engine in (0, 1) for log, said in parts_of(run, engine).items()}
        assert sorted(before) == ["engine-0-part-1.log", "engine-1-part-1.log"]
        assert all("joined at" in said for said in before.values())
        engines, parts = first.wait_serving(2), ends_of_parts()
        assert second.record(1)["engines"] == [], "engines are known once"

        os.kill(parts[0], signal.SIGKILL)  # a part dies: the whole engine is started again, and the other one stays
        await until(lambda: fleet.slots[0].ready and fleet.slots[0].process.pid != engines[0]["pid"])  # type: ignore[union-attr]
        assert "engine-0 is ended: part 1 of it, on node 1" in first.said and "SIGKILL" in first.said
        assert len(parts_of(run, 0)) == 2 and len(parts_of(run, 1)) == 1
        assert gone([engines[0]["pid"]], 0.0) and fleet.slots[1].process.pid == engines[1]["pid"]  # type: ignore[union-attr]

        os.kill(engines[1]["pid"], signal.SIGKILL)  # the server dies: its part, which would stay for ever, is ended
        await until(lambda: fleet.slots[1].ready and fleet.slots[1].process.pid != engines[1]["pid"])  # type: ignore[union-attr]
        assert gone([parts[1]], 0.0) and len(parts_of(run, 1)) == 2
        assert len(await fleet.generate(REQUEST)) == 2
        parts, pids = ends_of_parts(), [slot.process.pid for slot in fleet.slots]  # type: ignore[union-attr]

        second.process.kill()  # a supervisor dies with its parts: another one can take its place
        assert gone(parts)
        again = start(*flags, "--node", "1", module="stub_engine")
        await until(lambda: [slot.ready and slot.process.pid in pids for slot in fleet.slots] == [False] * 2)  # type: ignore[union-attr]
        await until(lambda: all(slot.ready for slot in fleet.slots))
        assert first.said.count("part 1 of it has another supervisor now") == 2
        assert len(await fleet.generate(REQUEST)) == 2
        seconds.append(again)

    seconds = [second]
    with_fleet(first.registry, body)
    second = seconds[-1]
    last = ends_of_parts()
    first.process.terminate()
    assert first.process.wait(20) == 0, first.said
    second.until(lambda: gone(last, 0.0))  # without part 0 they are of no use; their supervisor waits for another start
    second.process.terminate()
    assert second.process.wait(20) == 0, second.said
    assert not list(first.registry.glob("*.json"))


@pytest.mark.timeout(60)
def test_parts_of_an_engine_that_is_lost_end_too(start: Callable[..., Node]) -> None:
    flags = ("--rollout.num_engines", "1", "--rollout.engine_args", " --nnodes 2 --tp 2", "--nodes", "2")
    second = start(*flags, "--node", "1", module="stub_engine")
    first = start(*flags, "--node", "0", module="stub_engine", STUB_START_FAIL="3")
    assert first.process.wait(30) == 1 and second.process.wait(40) == 1
    assert "no engine of this node is left" in second.said and "engine-0 could not start" in second.said
    assert "Traceback" not in second.said


def test_a_run_alone_starts_no_engine_over_two_nodes(tmp_path: Path) -> None:
    config = RolloutConfig(engine="vllm", engine_args=["--nnodes 2", "-tp 16"])
    with pytest.raises(UserError, match="an engine over 2 nodes is started by supervisors"):
        Fleet(config, load_engine_kind("vllm"), model="none", dtype="bfloat16", folder=tmp_path)
