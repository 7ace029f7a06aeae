"""The reward pool against responses and rewards that hang, crash or eat memory. Workers here start in about 1 s."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luspo_megatron.config import RewardConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.reward import RewardInput, RewardPool, RewardResult

ROOT = Path(__file__).resolve().parents[2]


def misbehave(item: RewardInput) -> float:
    """A reward that does what the response says."""
    kind, _, value = item.response_text.partition(" ")
    if kind == "sleep":
        time.sleep(float(value))
    elif kind == "exit":
        os._exit(3)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "loop":
        return float(sum(1 for _ in iter(int, 1)))
    elif kind == "memory":
        return float(len(bytearray(2**33)))
    elif kind == "raise":
        raise ValueError("no")
    elif kind == "print":
        print("noise on stdout", flush=True)
    elif kind == "torch":
        return float("torch" in sys.modules or "megatron" in sys.modules)
    elif kind == "pid":
        return float(os.getpid())
    elif kind == "child":
        return float(subprocess.Popen(["sleep", "60"]).pid)
    elif kind == "hang_with_child":
        Path(value).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    elif kind == "number":
        return float(value)
    return 1.0


NAME = f"{__name__}:misbehave"


def grade(pool: RewardPool, *responses: str) -> list[RewardResult]:
    return asyncio.run(pool.score([RewardInput("", response) for response in responses]))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    config = RewardConfig(terms=(f"{NAME}:1.0",), workers=2, timeout=1.5, memory_mb=1024)
    with RewardPool(config) as started:
        yield started


@pytest.fixture(scope="module")
def math_pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig(workers=1, timeout=2.0)) as started:
        yield started


def test_order_over_two_workers(pool: RewardPool) -> None:
    results = grade(pool, *[f"number {i}" for i in range(200)])
    assert [result.reward for result in results] == list(range(200))
    assert all(result.failed is None and result.parts == {NAME: result.reward} for result in results)
    assert len({result.reward for result in grade(pool, *["pid"] * 20)}) == 2, "both workers took part"
    assert grade(pool) == []


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        ("sleep 60", "timeout"),
        ("loop", "timeout"),
        ("exit", "died"),
        ("segfault", "died"),
        ("memory", "memory"),
        ("raise", "error"),
    ],
)
def test_a_bad_sample_costs_itself_only(
    pool: RewardPool, response: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(pool.counts)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        results = grade(pool, "number 2", response, "number 3", "number 4")
    assert [result.reward for result in results] == [2, 0, 3, 4]
    bad = results[1]
    assert bad.failed is not None and bad.failed.startswith(kind) and bad.parts == {NAME: 0.0} and not bad.correct
    assert pool.counts[kind] == before.get(kind, 0) + 1 and pool.counts["scored"] == before.get("scored", 0) + 4
    assert (kind in caplog.text) or pool.counts[kind] > 2
    assert [result.reward for result in grade(pool, *["number 5"] * 4)] == [5] * 4, "usable after"
    assert time.monotonic() - start < 50


def test_many_bad_samples_at_once(pool: RewardPool) -> None:
    responses = ["exit", "number 1", "sleep 60", "number 2", "exit", "number 3", "number 4"]
    assert [result.reward for result in grade(pool, *responses)] == [0, 1, 0, 2, 0, 3, 4]


def test_a_worker_killed_while_idle_costs_no_sample(pool: RewardPool) -> None:
    pids = {int(result.reward) for result in grade(pool, *["pid"] * 20)}
    died = pool.counts["died"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_running, pids)), 5)
    assert [result.reward for result in grade(pool, "number 1", "number 2", "number 3")] == [1, 2, 3]
    assert pool.counts["died"] == died


def test_signals_for_the_run_do_not_reach_a_sample(pool: RewardPool) -> None:
    """A scheduler's SIGTERM and a terminal's Ctrl-C go to every process; the parent finishes its step with them."""
    pids = {int(result.reward) for result in grade(pool, *["pid"] * 20)}
    for pid in pids:
        assert os.getpgid(pid) != os.getpgid(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert {int(result.reward) for result in grade(pool, *["pid"] * 20)} == pids


def test_workers_import_no_torch_and_printing_does_no_harm(pool: RewardPool) -> None:
    assert [result.reward for result in grade(pool, "torch", "print", "number 7")] == [0, 1, 7]


def test_unpicklable_rows_fail_alone(pool: RewardPool) -> None:
    items = [RewardInput("", "number 1", {"lock": threading.Lock()}), RewardInput("", "number 2")]
    results = asyncio.run(pool.score(items))
    assert [result.reward for result in results] == [0, 2]
    assert "cannot be sent" in str(results[0].failed)


def test_what_a_hanging_reward_started_ends_with_it(pool: RewardPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert "timeout" in str(grade(pool, f"hang_with_child {note}")[0].failed)
    assert wait_until(lambda: not is_running(int(note.read_text())), 5)


def test_the_event_loop_stays_free(pool: RewardPool) -> None:
    async def main() -> int:
        grading = asyncio.create_task(pool.score([RewardInput("", "sleep 0.5")]))
        ticks = 0
        while not grading.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return ticks

    grade(pool, "number 1")
    assert asyncio.run(main()) >= 5


def test_math_in_the_pool(math_pool: RewardPool) -> None:
    items = [RewardInput("", r"\boxed{42}", {"answer": "42"}), RewardInput("", r"\boxed{41}", {"answer": "42"})]
    assert [result.reward for result in asyncio.run(math_pool.score(items))] == [1.0, 0.0]


@pytest.mark.parametrize("answer", ["10000000!", "9^{9^{9^{9}}}"])
def test_pathological_answers_do_not_hang_the_pool(math_pool: RewardPool, answer: str) -> None:
    start = time.monotonic()
    items = [RewardInput("", f"\\boxed{{{text}}}", {"answer": "42"}) for text in (answer, "42")]
    results = asyncio.run(math_pool.score(items))
    assert [result.reward for result in results] == [0.0, 1.0]
    assert results[0].failed is not None and not results[0].correct
    assert time.monotonic() - start < 50, "2 s limit, and a worker's start; far below what the parser would take"


def test_close_ends_the_workers_and_nothing_else() -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        pool = RewardPool(RewardConfig(terms=(f"{NAME}:1.0",), workers=2, timeout=30.0)).start()
        pids = {int(result.reward) for result in grade(pool, *["pid"] * 20)}
        busy = threading.Thread(target=lambda: results.extend(grade(pool, "sleep 20")))
        results: list[RewardResult] = []
        busy.start()
        time.sleep(0.3)
        start = time.monotonic()
        pool.close()
        pool.close()
        busy.join(5)
        assert time.monotonic() - start < 10 and results[0].failed is not None
        assert not any(map(is_running, pids))
        assert bystander.poll() is None
        with pytest.raises(RuntimeError, match="closed"):
            grade(pool, "number 1")
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_their_parent(busy: bool) -> None:
    """Also while a sample sleeps: the kernel timer of the worker ends it 5 s after its limit."""
    script = f"""
import asyncio, sys, time
from luspo_megatron.config import RewardConfig
from luspo_megatron.reward import RewardInput, RewardPool
pool = RewardPool(RewardConfig(terms=("{NAME}:1.0",), timeout=1.0 if {busy} else 10.0)).start()
print(int(asyncio.run(pool.score([RewardInput("", "pid")]))[0].reward), flush=True)
if {busy}:
    worker = pool._workers[0]
    worker.connection.send(RewardInput("", "loop"))
time.sleep(60)
"""
    path = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    parent = subprocess.Popen(
        [sys.executable, "-c", script.replace(__name__, Path(__file__).stem)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not is_running(pid), 30)


def test_mistakes_are_found_at_the_start() -> None:
    with pytest.raises(UserError, match="no_such_module_here"):
        RewardPool(RewardConfig(terms=("no_such_module_here:score:1.0",))).start()
    with pytest.raises(UserError, match="mth"):
        RewardPool(RewardConfig(terms=("mth:1",)))


def test_a_start_that_takes_too_long_is_an_error() -> None:
    with pytest.raises(RunError, match="not ready after 0 s"):
        RewardPool(RewardConfig(), start_timeout=0.01).start()




class StartsOnce:
    """Cannot be built a second time: the file that it needs is gone."""

    def __init__(self, config: RewardConfig) -> None:
        Path(config.answer_pattern).unlink()

    def score(self, item: RewardInput) -> float:
        return misbehave(item)


def test_workers_that_can_no_longer_start_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luspo_megatron.reward.pool.MAX_FAILED_STARTS", 2)
    note = tmp_path / "note"
    note.touch()
    with RewardPool(RewardConfig(terms=(f"{__name__}:StartsOnce:1.0",), answer_pattern=str(note))) as pool:
        assert grade(pool, "exit")[0].failed is not None
        with pytest.raises(RunError, match="cannot be started any more"):
            grade(pool, "number 1")
