"""The fleet with engine doubles that are real processes: routing, retries, deaths, restarts, weights, clean-up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from stub_engine import KIND, respond

from luspo_megatron.config import RolloutConfig
from luspo_megatron.errors import RunError
from luspo_megatron.rollout import keeper
from luspo_megatron.rollout.engine import GenerateRequest
from luspo_megatron.rollout.fleet import Fleet
from luspo_megatron.rollout.processes import OwnProcess, first_error, next_log_path

Body = Callable[[Fleet], Awaitable[None]]


def with_fleet(tmp_path: Path, body: Body, **settings: object) -> None:
    config = RolloutConfig(**{"num_engines": 2, "start_timeout": 30.0, "request_timeout": 20.0, **settings})  # type: ignore[arg-type]

    async def run() -> None:
        fleet = Fleet(config, KIND, model="none", dtype="float32", folder=tmp_path)
        await fleet.start()
        pids = [slot.process.pid for slot in fleet.slots if slot.process]
        try:
            await body(fleet)
        finally:
            pids += [slot.process.pid for slot in fleet.slots if slot.process]
            await fleet.close()
        assert not any(is_running(pid) for pid in pids)

    asyncio.run(run())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def requests(count: int) -> list[GenerateRequest]:
    return [GenerateRequest([[3, 4], [5]], [10 * i, 10 * i + 1], 1.0, 1.0, 8, [1]) for i in range(count)]


async def all_answers(fleet: Fleet, count: int) -> list[list[list[int]]]:
    answers = await asyncio.gather(*(fleet.generate(request) for request in requests(count)))
    return [[generation.response_ids for generation in answer] for answer in answers]


def expected(count: int) -> list[list[list[int]]]:
    return [[respond(p, s, 0)["response_ids"] for p, s in zip(r.prompts, r.seeds, strict=True)]  # type: ignore[misc]
            for r in requests(count)]


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_requests_are_spread_and_an_engine_killed_in_mid_rollout_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_DELAY", "0.1")

    async def body(fleet: Fleet) -> None:
        assert await all_answers(fleet, 6) == expected(6)
        served = [path.read_text().count("served") for path in sorted(tmp_path.glob("engine-*.log"))]
        assert sum(served) == 6 and min(served) >= 1
        running = asyncio.create_task(all_answers(fleet, 20))
        await asyncio.sleep(0.25)
        victim = fleet.slots[0].process
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        assert await running == expected(20)
        assert fleet.counts["retries"] >= 1
        await until(lambda: fleet.slots[0].ready)  # version 0: what it starts with is current, so it serves again
        assert fleet.counts["engine_restarts"] == 1 and len(fleet._serving()) == 2
        assert {path.name for path in tmp_path.glob("*.log")} == {"engine-0.log", "engine-0.1.log", "engine-1.log"}

    with_fleet(tmp_path, body)


def test_a_restarted_engine_serves_only_after_the_next_push(tmp_path: Path) -> None:
    async def body(fleet: Fleet) -> None:
        assert fleet.needs_connect and fleet.num_workers == 2
        await fleet.connect_weights("127.0.0.1", 1, 0, (0,), 3, 5.0)
        assert not fleet.needs_connect
        await fleet.update_weights({"version": 7, "buckets": []})
        assert fleet.weight_version == 7
        with pytest.raises(RunError, match="push 9 does not follow version 7"):
            await fleet.update_weights({"version": 9, "buckets": []})
        victim = fleet.slots[1].process
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        await until(lambda: not fleet.slots[1].ready)
        assert fleet.needs_connect
        await until(lambda: fleet.slots[1].ready)
        assert fleet.needs_connect and fleet._serving() == [fleet.slots[0]]
        answers = await asyncio.gather(*(fleet.generate(request) for request in requests(4)))
        assert {g.weight_version_start for answer in answers for g in answer} == {7}
        with pytest.raises(RunError, match="planned for 1 engine workers, 2 are ready"):
            await fleet.connect_weights("127.0.0.1", 1, 1, (0,), 2, 5.0)
        await fleet.connect_weights("127.0.0.1", 1, 1, (0,), 3, 5.0)
        await fleet.update_weights({"version": 8, "buckets": []})
        assert len(fleet._serving()) == 2 and not fleet.needs_connect

    with_fleet(tmp_path, body)


def test_no_engine_left_is_an_error_with_the_last_log_lines(tmp_path: Path) -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.connect_weights("127.0.0.1", 1, 0, (0,), 2, 5.0)
        await fleet.update_weights({"version": 1, "buckets": []})
        await fleet.generate(requests(1)[0])
        process = fleet.slots[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"(?s)no engine is left.*version 1"):
            await fleet.generate(requests(1)[0])

    with_fleet(tmp_path, body, num_engines=1)


def test_an_engine_that_keeps_dying_is_given_up_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MAX_RESTARTS", 1)

    async def body(fleet: Fleet) -> None:
        monkeypatch.setenv("STUB_START_FAIL", "3")
        process = fleet.slots[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"(?s)no engine is left.*told not to start"):
            await fleet.generate(requests(1)[0])

    with_fleet(tmp_path, body, num_engines=1, max_retries=5)


@pytest.mark.parametrize(("restarts", "message"), [
    (0, "fewer than rollout.min_engines=2 engines are left.*engine-0: it was started again 0 times"),
    (9, "fewer than rollout.min_engines=2 engines have been healthy for 2 s .*restart_timeout"),
])
def test_too_few_engines_for_too_long_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int,
                                                  message: str) -> None:
    """One engine would go on serving; the person has asked for two."""
    monkeypatch.setattr(keeper, "MAX_RESTARTS", restarts)
    monkeypatch.setattr(keeper, "POLL_SECONDS", 0.5)

    async def body(fleet: Fleet) -> None:
        monkeypatch.setenv("STUB_START_FAIL", "3")
        process = fleet.slots[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        answered = 0
        with pytest.raises(RunError, match="(?s)" + message):
            while answered < 400:
                await fleet.generate(requests(1)[0])
                answered += 1
                await asyncio.sleep(0.02)
        assert answered > 0 or restarts == 0  # an engine that is given up ends the run without a wait

    with_fleet(tmp_path, body, min_engines=2, restart_timeout=2.0)


def test_failing_requests_are_retried_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "fail"
    monkeypatch.setenv("STUB_FAIL", str(flag))

    async def body(fleet: Fleet) -> None:
        flag.touch()
        with pytest.raises(RunError, match=r"failed 3 times .*max_retries=2.*told to fail"):
            await fleet.generate(requests(1)[0])
        assert fleet.counts["retries"] == 2
        flag.unlink()
        assert await all_answers(fleet, 2) == expected(2)

    with_fleet(tmp_path, body, max_retries=2)


def test_an_engine_that_cannot_start_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_START_FAIL", "3")

    async def nothing(fleet: Fleet) -> None:
        raise AssertionError("the fleet started")

    with pytest.raises(RunError, match=r"(?s)engine-\d could not start.*exit code 3.*told not to start"):
        with_fleet(tmp_path, nothing)


def test_engines_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, time; from pathlib import Path; from stub_engine import KIND\n"
        "from luspo_megatron.config import RolloutConfig; from luspo_megatron.rollout.fleet import Fleet\n"
        "async def run():\n"
        f"    fleet = Fleet(RolloutConfig(), KIND, model='', dtype='float32', folder=Path({str(tmp_path)!r}))\n"
        "    await fleet.start(); print(fleet.slots[0].process.pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(run())"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": path})
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert is_running(pid)
    os.kill(pid, signal.SIGTERM)  # as when a whole job is signalled: the owner decides
    time.sleep(0.3)
    assert is_running(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stop_kills_a_child_that_will_not_go_and_logs_are_never_overwritten(tmp_path: Path) -> None:
    script = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); "
              "time.sleep(60)")
    log = next_log_path(tmp_path, "child")
    child = OwnProcess("child", [sys.executable, "-c", script], log)
    while "here" not in log.read_text():
        time.sleep(0.05)
    child.stop(grace=0.3)
    assert child.returncode == -signal.SIGKILL
    assert "SIGKILL" in child.describe_end() and "here" in child.describe_end()
    assert next_log_path(tmp_path, "child").name == "child.1.log"


def test_the_end_of_an_engine_names_its_first_error(tmp_path: Path) -> None:
    """Its other processes talk on after the one that failed; a warning that mentions an error is none."""
    lines = ["WARNING 12-02 [system_utils.py:255] errors like `OSError: [Errno 24] Too many open files`",
             "(Worker pid=5933) ERROR 12-02 15:16:24 [executor.py:1063] RuntimeError: head_dim=24 is not supported",
             "vllm.v1.engine.exceptions.EngineDeadError: see above", *(f" - leaked function {i}" for i in range(30))]
    script = f"print({chr(10).join(lines)!r}); raise SystemExit(1)"
    child = OwnProcess("child", [sys.executable, "-c", script], tmp_path / "child.log")
    while child.returncode is None:
        time.sleep(0.05)
    said = child.describe_end()
    assert "the first error: RuntimeError: head_dim=24 is not supported; the last lines" in said
    assert "leaked function 29" in said and "OSError" not in said
    assert first_error(tmp_path / "none.log") == ""
