"""The run's front desk: rollouts, evaluation and reports, which rank 0 does for all ranks.

Rank 0 owns the controller client and the report; the other ranks call the same methods and get what is broadcast over
the control plane. While rank 0 waits for a rollout, the others wait in gloo, never in NCCL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from luspo_megatron.config import Config
from luspo_megatron.config_io import save_config
from luspo_megatron.errors import RunError
from luspo_megatron.launch import stop
from luspo_megatron.ranks import Ranks
from luspo_megatron.report.environment import write_environment
from luspo_megatron.report.html import write_report
from luspo_megatron.report.metrics import METRICS_FILE, MetricSinks
from luspo_megatron.report.progress import Phase, Progress
from luspo_megatron.report.records import read_lines
from luspo_megatron.report.summary import RunSummary, evaluations, print_summary, write_summary
from luspo_megatron.report.trackers import Prometheus, Tracker, WandB
from luspo_megatron.report.watch import MetricWatch
from luspo_megatron.rollout.client import ControllerClient
from luspo_megatron.run import resume_command, save_settings
from luspo_megatron.types import Group

SAMPLES_SHOWN = 3


class Desk:
    """One per rank. `state` is the run's state (a checkpoint's, or a new one)."""

    def __init__(self, config: Config, ranks: Ranks, state: dict[str, Any], *, resumed: bool, began: float) -> None:
        self._config, self._ranks, self._began = config, ranks, began
        self._seconds_before = float(state.get("seconds", 0.0))
        self._phase: Phase | None = None
        self._seen = 0
        self._saved: Path | None = None
        self.client: ControllerClient | None = None
        self._progress: Progress | None = None
        self._sinks: MetricSinks | None = None
        self._push_again: Callable[[], None] | None = None
        if ranks.rank == 0:
            run_dir = Path(config.run.dir)
            self._progress = Progress(max(0, config.run.steps - state["step"]), run_dir=run_dir)
            self._watch = MetricWatch(self._progress.warning)
            if resumed:
                self._watch.recall(read_lines(run_dir / METRICS_FILE)[0])
                self._progress.message(f"resuming after step {state['step']}")
            self._progress.message(f"layout {ranks.layout}, {ranks.layout.world_size} trainer processes; run folder "
                                   f"{run_dir}; starting engines")
            try:
                self.client = self._start_controller(state)
                # Only now, when data, rewards and engines are found good, is the run folder touched.
                resume_step = state["step"] if resumed else None
                self._sinks = MetricSinks(run_dir, config.run.tensorboard, resume_step, warn=self._progress.warning,
                                          trackers=trackers(config, run_dir, resume_step))
                save_settings(config, run_dir)
                write_environment(run_dir)
            except BaseException:
                self._close()
                raise

    def _start_controller(self, state: dict[str, Any]) -> ControllerClient:
        run_dir = Path(self._config.run.dir)
        with tempfile.TemporaryDirectory(prefix="luspo-") as folder:
            path = Path(folder) / "config.yaml"
            save_config(self._config, path)
            client = ControllerClient.start(path, run_dir, on_progress=self._on_progress)
        self.client = client
        if state.get("controller") is not None:
            client.load_state(state["controller"])
        return client

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self._sinks is not None:
            self._sinks.close()
        if self._progress is not None:
            self._progress.close()

    # ------------------------------------------------------------------ phases
    @contextlib.contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[Any]:
        """A measured phase with a bar; nothing is shown on other ranks."""
        if self._progress is None:
            yield _Silent()
            return
        with self._progress.phase(name, total) as phase:
            self._phase, self._seen = phase, 0
            try:
                yield phase
            finally:
                self._phase = None

    def _on_progress(self, name: str, done: int, total: int) -> None:
        phase = self._phase
        if phase is not None:
            # counts start again with each request of the phase (samples, then greedy)
            phase.advance(done - self._seen if done >= self._seen else done)
            self._seen = done

    def begin(self, step: int) -> None:
        self._step_began = time.monotonic()
        if self._progress is not None:
            self._progress.step = step
            self._progress.take_seconds()

    # ------------------------------------------------------------------ what the controller does
    def rollout(self, step: int) -> list[Group] | None:
        """The groups of a step, with rewards, on every rank; None when rank 0 was asked to stop before they came (the
        controller is then in the middle of a rollout: its state is not to be kept)."""
        groups: list[Group] | None = None
        handle: Any = None
        size = self._config.rollout
        with self.phase("rollout", size.prompts_per_step * size.group_size):
            if self.client is not None:
                handle = self.client.next_batch_async(step)
            self._wait_and_push(handle)
            if self.client is not None and handle.done():
                groups = self.client.batch_of(handle)
                self._warn_of(self.client.statistics)
            return self._ranks.broadcast(groups)  # type: ignore[no-any-return]

    def push(self, sync: Any, version: int, again: Callable[[], None] | None = None) -> None:
        """``sync.push(version)``, and ``again`` (the same) when an engine that was started again needs these
        weights."""
        if self.client is not None:
            self.client.push_version = version
        sync.push(version)
        self._push_again = again or (lambda: sync.push(version))

    def sleep(self) -> None:
        """Engines give their memory back (hand_over.py); every rank waits for it."""
        self._ranks.broadcast(None if self.client is None else self.client.call("sleep"))

    def wake(self, what: str) -> None:
        """``what``: "weights" or "kv_cache"."""
        self._ranks.broadcast(None if self.client is None else self.client.call("wake", what=what))

    def _wait_and_push(self, handle: Any) -> None:
        """Every rank waits for the controller's answer, or until rank 0 is asked to stop, and pushes the current
        weights again whenever an engine that was started again needs them to go on. A push that fails is a warning
        here: other engines may serve."""
        while self._ranks.broadcast(None if self.client is None else not self.client.wait(handle, stop.requested)):
            assert self._push_again is not None
            if self._progress is not None:
                self._progress.warning("an engine was started again: it gets the current weights")
            try:
                self._push_again()
            except RunError as error:
                if self._progress is not None:
                    self._progress.warning(f"the engine did not take the weights: {error}")

    def warn(self, text: str) -> None:
        """A warning that the person sees once, and the summary keeps."""
        if self._progress is not None:
            self._progress.warning(text)

    def _warn_of(self, statistics: dict[str, float]) -> None:
        assert self._progress is not None
        for name, what in (("reward_timeout", "rewards ran into their time limit and count 0"),
                           ("reward_died", "reward workers died; their samples count 0"),
                           ("reward_error", "rewards raised an error and count 0"),
                           ("engine_restarts", "engines were restarted")):
            if statistics.get(name):
                self._progress.warning(f"{int(statistics[name])} {what}")

    def evaluate(self, step: int, *, full: bool) -> bool:
        """pass@1, pass@k and greedy on the held-out prompts; all of them when `full`. On every rank: False when rank 0
        was asked to stop before the answers came."""
        config = self._config
        handle: Any = None
        with self.phase("eval"):
            if self.client is not None:
                handle = self.client.evaluate_async(config.eval.samples, config.eval.temperature,
                                                    config.eval.greedy and full,
                                                    0 if full else config.eval.interim_size, config.run.seed)
            self._wait_and_push(handle)
            if not self._ranks.broadcast(None if handle is None else handle.done()):
                return False
            result = handle.result() if handle is not None else {}
        if self._progress is not None and self._sinks is not None:
            metrics = {f"eval/{ours}": result[theirs] for ours, theirs in (
                ("pass_at_1",) * 2, ("pass_at_1_se",) * 2, ("pass_at_k",) * 2, ("greedy",) * 2,
                ("response_length_mean", "mean_length"), ("prompts", "n")) if theirs in result}
            metrics |= self._progress.take_seconds()
            self._sinks.write(step, metrics)
            self._progress.step_row({"step": step, **metrics})
        self._ranks.broadcast(None)  # nobody starts the next phase in a collective that rank 0 is late for
        return True

    def evaluated(self, step: int) -> bool:
        """Whether the metrics hold an evaluation of this step already; the same answer on every rank."""
        found = None
        if self._ranks.rank == 0:
            records = read_lines(Path(self._config.run.dir) / METRICS_FILE)[0]
            found = any(record.get("step") == step and "eval/pass_at_1" in record for record in records)
        return bool(self._ranks.broadcast(found))

    def controller_state(self) -> dict[str, Any] | None:
        return None if self.client is None else self.client.state()

    def seconds_so_far(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    # ------------------------------------------------------------------ what a person sees
    def report(self, step: int, groups: Sequence[Group], make_metrics: Callable[[], dict[str, Any]]) -> None:
        """The row of a step."""
        if self._progress is None or self._sinks is None:
            return
        metrics = make_metrics() | self._progress.take_seconds()
        metrics["seconds/step"] = time.monotonic() - self._step_began
        metrics["tokens_per_second"] = metrics["tokens"] / metrics["seconds/step"]
        self._sinks.write(step, metrics)
        self._progress.step_row({"step": step, **metrics})
        self._watch.observe(metrics)
        every = self._config.run.sample_table_every
        if every and (step % every == 0 or step == 1):
            samples = [groups[i * len(groups) // SAMPLES_SHOWN] for i in range(min(SAMPLES_SHOWN, len(groups)))]
            rows = [{"prompt": g.prompt.text, "response": g.samples[0].response_text, "reward": g.samples[0].reward,
                     "length": len(g.samples[0].response_ids), "correct": g.samples[0].correct,
                     "group_id": g.group_id, "weight_version": g.samples[0].weight_version_start} for g in samples]
            self._sinks.write_samples(step, rows)
            if self._progress.live:
                self._progress.sample_table(rows)

    def saved(self, step: int, path: Path) -> None:
        self._saved = path
        if self._progress is not None and self._sinks is not None:
            self._sinks.write(step, self._progress.take_seconds())
            self._progress.message(f"saved {path}")

    def stopped(self, step: int) -> None:
        """The end of a run that was asked to stop."""
        stop.mark()
        self._finish(step, None, finished=False)

    def finish(self, state: dict[str, Any], export: Path | None) -> None:
        self._finish(state["step"], export, finished=True)

    def _finish(self, step: int, export: Path | None, *, finished: bool) -> None:
        if self._progress is None:
            return
        config, run_dir = self._config, Path(self._config.run.dir)
        summary = RunSummary(
            **evaluations(run_dir), k=config.eval.samples, seconds=self.seconds_so_far(), steps=step,  # type: ignore[arg-type]
            finished=finished, layout=str(self._ranks.layout), seed=config.run.seed, cold_start=config.model.hf,
            checkpoint=str(self._saved) if self._saved else None, export=str(export) if export else None,
            prompts=config.data.eval_prompts or None, report=str(run_dir / "report.html"),
            metrics=str(run_dir / "metrics.jsonl"),
            resume_command=None if finished else resume_command("train", run_dir),
            warnings=self._progress.warnings)
        write_summary(run_dir, summary)
        write_report(run_dir)
        self._progress.close()
        print_summary(self._progress, summary)


def trackers(config: Config, run_dir: Path, resume_step: int | None) -> list[Tracker]:
    """Those that the configuration asks for, TensorBoard apart. What cannot start is a UserError."""
    out: list[Tracker] = []
    if config.run.prometheus_port:
        out.append(Prometheus(config.run.prometheus_host, config.run.prometheus_port))
    if config.run.wandb != "off":
        run_dir.mkdir(parents=True, exist_ok=True)
        out.append(WandB(run_dir, config.run.wandb, config.run.wandb_project, dataclasses.asdict(config), resume_step))
    return out


class _Silent:
    def advance(self, n: float = 1) -> None: ...
