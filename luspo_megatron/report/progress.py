"""What scrolls by while a run goes on: a bar per phase and a table row per step.

In a terminal (rich): one bar for the run and one per phase with the time left, rows above them. Elsewhere (a log file,
a pipe): the same rows and messages as plain lines, and for long phases a line now and then; no control characters.
Text of models is shown with its control characters spelled out. Used from one thread.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from luspo_megatron.report.metrics import format_metric
from luspo_megatron.report.records import append_line
from luspo_megatron.report.table import fitting_columns, header_lines, row_line
from luspo_megatron.report.text import duration, shorten, visible

WARNINGS_FILE = "warnings.jsonl"
PLAIN_WIDTH = 160
SAMPLE_CHARACTERS = 400


class Phase:
    """One running phase; ``advance(n)`` as its work gets done, ``seconds`` so far (final after the with block)."""

    def __init__(self, progress: Progress, name: str, total: float | None) -> None:
        self.name = name
        self.total = total
        self.done = 0.0
        self._progress = progress
        self._start = time.perf_counter()
        self._end: float | None = None
        self.task: Any = None
        self.last_line = self._start

    @property
    def seconds(self) -> float:
        return (self._end or time.perf_counter()) - self._start

    @property
    def seconds_left(self) -> float | None:
        """At the mean speed so far; None before the first advance and without a total."""
        if self.total is None or self.done <= 0:
            return None
        return self.seconds * max(self.total - self.done, 0.0) / self.done

    def advance(self, n: float = 1) -> None:
        """``n`` more of ``total`` are done."""
        self.done += n
        self._progress._advanced(self)

    def finish(self) -> None:
        self._end = time.perf_counter()


class Progress:
    """Shows a run. ``total_steps`` is what this process will do (after a resume: the rest); None: no bar for the run.

    ``run_dir``: warnings are also appended to <run_dir>/warnings.jsonl. ``plain_interval``: seconds between two
    lines of one phase where stdout is not a terminal. Set ``step`` when a step begins: warnings are recorded with it.
    """

    def __init__(self, total_steps: int | None = None, *, run_dir: str | Path | None = None,
                 console: Console | None = None, header_every: int = 20, plain_interval: float = 30.0) -> None:
        # A console made here never takes a pipe for a terminal, whatever FORCE_COLOR says.
        self.console = console or Console(force_terminal=None if sys.stdout.isatty() else False, highlight=False)
        self.live = self.console.is_interactive
        self.warnings: dict[str, int] = {}
        self._warnings_path = Path(run_dir) / WARNINGS_FILE if run_dir is not None else None
        self._header_every = header_every
        self._plain_interval = plain_interval
        self._rows = 0
        self._columns_width = 0
        self.step: int | None = None
        self._seconds: dict[str, float] = {}
        self._run = Phase(self, "run", total_steps)
        self._bars = _bars(self.console) if self.live else None
        if self._bars:
            if total_steps is not None:
                self._run.task = self._bars.add_task("steps", total=total_steps, phase=self._run)
            self._bars.start()
            atexit.register(self.close)  # the cursor comes back even when nobody closes

    @contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[Phase]:
        """Measure a phase: ``with progress.phase("rollout", total=256) as phase: ... phase.advance()``.

        Its seconds are added to those of its name (see ``take_seconds``), also when an exception ends it.
        """
        phase = Phase(self, name, total)
        if self._bars:
            phase.task = self._bars.add_task(visible(name, lines=False), total=total, phase=phase)
        try:
            yield phase
        finally:
            phase.finish()
            self._seconds[name] = self._seconds.get(name, 0.0) + phase.seconds
            if self._bars:
                self._bars.remove_task(phase.task)

    def take_seconds(self) -> dict[str, float]:
        """{"seconds/<phase>": seconds since the last call}, and start again from 0."""
        seconds = {f"seconds/{name}": value for name, value in self._seconds.items()}
        self._seconds = {}
        return seconds

    def step_row(self, metrics: Mapping[str, Any]) -> None:
        """Print one step (metrics with "step") as a table row, under a header now and then; an evaluation as a line."""
        self.step = metrics.get("step", self.step)
        if metrics.get("eval/pass_at_1") is not None:
            self._print(_evaluation_line(metrics))
        if metrics.get("reward_mean") is None:  # only an evaluation: before the first step
            return
        width = self.console.width if self.live else PLAIN_WIDTH
        columns = fitting_columns(width)
        if self._rows % self._header_every == 0 or width != self._columns_width:
            for line in header_lines(columns):
                self._print(line, style="bold")
        self._rows += 1
        self._columns_width = width
        self._print(row_line(columns, metrics))
        self._run.advance(1)

    def message(self, text: str) -> None:
        """Print a line."""
        self._print(visible(text))

    def warning(self, text: str) -> None:
        """Print a warning, keep it for the summary and the report. Repeats are counted, not printed each time."""
        count = self.warnings[text] = self.warnings.get(text, 0) + 1
        if self._warnings_path:
            append_line(self._warnings_path, {"step": self.step, "time": round(time.time(), 3), "text": text})
        if count in (1, 10, 100, 1000, 10000):
            self._print(visible(f"warning: {text}" + (f" ({count} times so far)" if count > 1 else "")), style="yellow")

    def sample_table(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Print samples: prompt, response, reward, length (and correct) of each, with their text."""
        for number, row in enumerate(rows, start=1):
            parts = [f"sample {number}"]
            if "reward" in row:
                parts.append(f"reward {format_metric('reward_mean', row['reward'])}")
            if row.get("length") is not None:
                parts.append(f"{row['length']} tokens")
            if row.get("correct") is not None:
                parts.append("correct" if row["correct"] else "wrong")
            self._print(", ".join(parts), style="bold")
            for name in ("prompt", "response"):
                text = shorten(visible(row.get(name, "")), SAMPLE_CHARACTERS).replace("\n", "\n" + " " * 12)
                self._print(f"  {name + ':':<9} {text}")

    def close(self) -> None:
        """Take the bars away; printing still works afterwards."""
        if self._bars:
            self._bars.stop()
            self._bars = None
            atexit.unregister(self.close)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _advanced(self, phase: Phase) -> None:
        if self._bars and phase.task is not None:
            self._bars.update(phase.task, completed=phase.done)
        elif not self.live and phase is not self._run:
            now = time.perf_counter()
            if now - phase.last_line >= self._plain_interval and (phase.total is None or phase.done < phase.total):
                phase.last_line = now
                left = f", {duration(phase.seconds_left)} left" if phase.seconds_left is not None else ""
                self._print(visible(f"{phase.name} {_amount(phase)}{left}", lines=False))

    def _print(self, text: str, style: str | None = None) -> None:
        encoding = self.console.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)  # a log in ASCII must not end the run
        self.console.print(Text(text), style=style, soft_wrap=True, highlight=False)
        if not self.live:
            self.console.file.flush()  # a log is read while the run goes on


def _evaluation_line(metrics: Mapping[str, Any]) -> str:
    """step 50, held out: pass@1 41.2% (se 0.9%), pass@k 66.0%, greedy 78.0%, 11.3 tokens"""
    def shown(name: str) -> str:
        return format_metric(name, metrics.get(name))

    parts = [f"pass@1 {shown('eval/pass_at_1')}"]
    if metrics.get("eval/pass_at_1_se") is not None:
        parts[0] += f" (se {shown('eval/pass_at_1_se')})"
    for name, title in (("eval/pass_at_k", "pass@k"), ("eval/greedy", "greedy")):
        if metrics.get(name) is not None:
            parts.append(f"{title} {shown(name)}")
    if metrics.get("eval/response_length_mean") is not None:
        parts.append(f"{shown('eval/response_length_mean')} tokens")
    return f"step {metrics.get('step', '?')}, held out: " + ", ".join(parts)


def _amount(phase: Phase) -> str:
    if phase.total is None:
        return f"{phase.done:.0f}"
    return f"{phase.done:.0f}/{phase.total:.0f}"


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_amount(task.fields["phase"]))


class _TimeLeft(ProgressColumn):
    """Time left at the mean speed of the whole phase: steps may take minutes, longer than rich's window of speeds."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        phase: Phase = task.fields["phase"]
        left = phase.seconds_left
        return Text(f"{duration(left)} left" if left is not None else duration(phase.seconds))


def _bars(console: Console) -> RichProgress:
    spinner = "dots" if console.encoding.startswith("utf") else "line"
    columns = (SpinnerColumn(spinner), TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
               _Amount(), _TimeLeft())
    return RichProgress(*columns, console=console, transient=True, expand=True, refresh_per_second=4)
