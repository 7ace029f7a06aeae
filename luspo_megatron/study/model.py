"""`luspo study model`: the same comparison with `luspo train`, from the same weights and on the same prompts.

Each objective runs with each seed as a `luspo train` of its own, one after another, in <out>/<objective>-seed<seed>;
what is complete there stays, what was interrupted is resumed. The seed is that of data order and sampling: two
objectives with the same seed see the same prompts in the same order. The report is the comparison of
`luspo report` with one line per objective, and a paragraph that says what came out, whatever that is.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import fmean

from luspo_megatron import config_checks
from luspo_megatron.config import Config
from luspo_megatron.config_io import save_config
from luspo_megatron.config_tools import ModelStudyConfig, algorithms_of, variant
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.report.compare import RunData, read_run, write_comparison
from luspo_megatron.report.length_change import change_over
from luspo_megatron.report.metrics import METRICS_FILE
from luspo_megatron.report.progress import Phase, Progress
from luspo_megatron.report.shell import table
from luspo_megatron.report.summary import evaluations, read_summary
from luspo_megatron.study.outcome import NAMES

LOG_FILE = "train.log"
LOOK_EVERY = 1.0  # seconds between two looks at a run's metrics
LOG_LINES = 15


def main(config: ModelStudyConfig) -> int:
    out = Path(config.out)
    seeds = range(config.run.seed, config.run.seed + config.seeds)
    jobs = [run_config(config, name, seed) for seed in seeds for name in algorithms_of(config.algorithms)]
    for job in jobs:
        config_checks.require(config_checks.validate(job))
    with Progress() as progress:
        if not config.report_only:
            waiting = [job for job in jobs if not is_complete(job)]
            progress.message(f"{len(jobs)} runs of {config.run.steps} steps, {len(jobs) - len(waiting)} of them "
                             f"complete; folder {out}")
            with progress.phase("steps", len(waiting) * config.run.steps) as phase:
                for job in waiting:
                    progress.message(f"{Path(job.run.dir).name}: {job.algorithm.objective}, seed {job.run.seed}")
                    train(job, phase)
        done = [job for job in jobs if is_complete(job)]
        if not done:
            raise UserError(f"{out} holds no complete run of this study; run it without --report_only")
        runs = [read_run(Path(job.run.dir), NAMES[job.algorithm.objective]) for job in done]
        path = write_comparison(runs, out / "report.html", title="Length-bias study on a model",
                                intro=intro(runs, len(jobs)))
        for sentence in findings(runs):
            progress.message(sentence)
        progress.message(str(path))
    return 0


def run_config(config: ModelStudyConfig, objective: str, seed: int) -> Config:
    """The settings of one run of the study."""
    base = {item.name: getattr(config, item.name) for item in dataclasses.fields(Config)}
    folder = str(Path(config.out) / f"{objective}-seed{seed}")
    algorithm = variant(config.algorithm, objective, (config.token_clip_low, config.token_clip_high))
    return Config(**base | {"run": replace(config.run, dir=folder, seed=seed), "algorithm": algorithm})


def is_complete(job: Config) -> bool:
    """Whether the run's folder holds a finished run of as many steps."""
    summary = read_summary(Path(job.run.dir))
    return bool(summary.get("finished")) and summary.get("steps") == job.run.steps


def train(job: Config, phase: Phase) -> None:
    """One `luspo train` in a process of its own; its output goes to train.log. Raises RunError when it fails."""
    folder = Path(job.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "study.yaml"
    save_config(job, settings)
    command = [sys.executable, "-m", "luspo_megatron", "train", "--config", str(settings)]
    seen = 0
    with (folder / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY)
                now = min(_steps(folder), job.run.steps)
                phase.advance(max(0, now - seen))
                seen = max(seen, now)
        except BaseException:
            process.terminate()  # luspo train saves and stops
            process.wait()
            raise
    if process.returncode:
        tail = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        raise RunError(f"{folder.name} ended with exit code {process.returncode}; the end of {folder / LOG_FILE}:\n"
                       + "\n".join(tail))
    phase.advance(max(0, job.run.steps - seen))


def _steps(folder: Path) -> int:
    """Rows of metrics.jsonl, about the steps done (a run also has a row for its first evaluation)."""
    path = folder / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


# ------------------------------------------------------------------------------------------------------- the report
def findings(runs: Sequence[RunData]) -> list[str]:
    """Sentences on what these runs did, without a judgement of why."""
    ends: dict[str, dict[int, float]] = {}
    sentences = []
    for label in dict.fromkeys(run.label for run in runs):
        group = [run for run in runs if run.label == label]
        changes = {int(run.settings.get("run.seed", 0)): change for run in group
                   if (change := change_over(run.training))}
        if not changes:
            continue
        ends[label] = {seed: change.now for seed, change in changes.items()}
        start, end = fmean(change.start for change in changes.values()), fmean(ends[label].values())
        text = (f"{label}: response length in training {start:.1f} to {end:.1f} tokens ({end / start - 1:+.0%}; by "
                f"seed {min(ends[label].values()):.1f} to {max(ends[label].values()):.1f})")
        rates = [evaluations(run.folder) for run in group]
        known = [(rate["pass_rate_before"], rate["pass_rate_after"]) for rate in rates]
        both = [(before, after) for before, after in known if before is not None and after is not None]
        if both:
            text += f"; held-out pass rate {fmean(b for b, _ in both):.1%} to {fmean(a for _, a in both):.1%}"
        sentences.append(text + ".")
    for other in ends:
        if "LUSPO" in ends and other != "LUSPO":
            shared = sorted(set(ends["LUSPO"]) & set(ends[other]))
            ahead = sum(ends["LUSPO"][seed] > ends[other][seed] for seed in shared)
            sentences.append(f"LUSPO ended longer than {other} in {ahead} of {len(shared)} seeds.")
    return sentences


def intro(runs: Sequence[RunData], planned: int) -> str:
    """The findings, their limits, and a table of lengths by seed, as HTML."""
    rows = []
    for run in runs:
        change = change_over(run.training)
        rows.append((run.folder.name, *(("-", "-", "-") if change is None else
                                        (f"{change.start:.1f}", f"{change.now:.1f}", change.share))))
    gone = planned - len(runs)
    missing = f" {gone} of the {planned} planned runs are not complete and left out." if gone else ""
    caution = ("The task has its own wishes about the length (correct responses have the length their answer needs), a "
               "few seeds say little about small differences, and learning rate and clip decide how often the clip "
               "acts at all: see the clip fractions below. The tabular study (luspo study length-bias) takes "
               "these apart.")
    return ("<h2>What these runs did</h2>" + "".join(f"<p>{escape(text)}</p>" for text in findings(runs))
            + f'<p class="note">{escape(caution + missing)}</p>'
            + table(("run", "length of the first steps, tokens", "of the last steps", "change"), rows))
