"""`luspo study length-bias`: objectives on the tabular policy, same prompts, luck and start; runs in parallel.

Every update goes through `policy_objective` and every measurement through `step_statistics`, as in `luspo train`; only
policy and task are small (tabular.py). Writes runs.jsonl as runs finish, then the figures and report.html.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from luspo_megatron.algorithm.advantages import group_advantages
from luspo_megatron.algorithm.objectives import policy_objective
from luspo_megatron.algorithm.statistics import step_statistics
from luspo_megatron.config_tools import TOKEN_LEVEL, LengthBiasConfig, algorithms_of
from luspo_megatron.report.metrics import STATISTICS_NAMES
from luspo_megatron.report.progress import Progress
from luspo_megatron.report.records import append_line, set_aside, write_json
from luspo_megatron.study.tabular import STOP, Rollout, TabularPolicy, sample

RUNS_FILE = "runs.jsonl"
STUDY_FILE = "study.json"
LAST = 5  # the end is the mean over so many last rollouts
CLIP_GRAD = 1.0
STEPS_AT_ONCE = 5  # progress is told in such portions

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One line of the figures. ``clip`` is "usual" or "wide"."""

    algorithm: str
    clip: str
    clip_low: float
    clip_high: float


def variants(config: LengthBiasConfig) -> list[Variant]:
    names = algorithms_of(config.algorithms)
    token = (config.token_clip_low, config.token_clip_high)
    found = [Variant(name, "usual", *(token if name in TOKEN_LEVEL else (config.clip_low, config.clip_high)))
             for name in names]
    if config.wide_clip:
        found += [Variant(name, "wide", config.wide_clip_low, config.wide_clip_high)
                  for name in names if name in ("luspo", "gspo")]
    return found


def run_one(config: LengthBiasConfig, variant: Variant, seed: int,
            on_steps: Callable[[int], None] = lambda steps: None) -> Row:
    """One training run; the row of runs.jsonl. Repeats exactly for equal arguments."""
    torch.set_num_threads(1)
    began = time.process_time()
    generator = torch.Generator().manual_seed(1000 + seed)
    policy = TabularPolicy(config.max_response_tokens, config.start_length)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr)
    rows = []
    for step in range(config.steps + 1):
        rollout = sample(policy, config.task, config.prompts, config.group_size, generator)
        row = {"step": step, **_train_step(config, variant, policy, optimizer, rollout, generator, step < config.steps)}
        rows.append({name: float(f"{value:.7g}") for name, value in row.items()} | {"step": step})
        if step and step % STEPS_AT_ONCE == 0:
            on_steps(STEPS_AT_ONCE)
    on_steps(config.steps % STEPS_AT_ONCE)
    acting = rows[:-1]

    def end(name: str) -> float:
        return float(np.mean([row[name] for row in rows[-LAST:]]))

    def mean(name: str) -> float | None:
        values = [row[name] for row in acting if name in row]
        return float(np.mean(values)) if values else None

    names = [name for name in dict.fromkeys(name for row in rows for name in row)]
    return {
        "algorithm": variant.algorithm, "clip": variant.clip, "clip_low": variant.clip_low,
        "clip_high": variant.clip_high, "task": config.task, "seed": seed,
        "length_start": rows[0]["response_length_mean"], "length_end": end("response_length_mean"),
        "accuracy_start": rows[0]["pass_rate"], "accuracy_end": end("pass_rate"),
        "clip_positive": mean("clip_fraction_positive"), "clip_negative": mean("clip_fraction_negative"),
        "cpu_seconds": time.process_time() - began,
        "curve": {name: [row.get(name) for row in rows] for name in names},
    }


def _train_step(config: LengthBiasConfig, variant: Variant, policy: TabularPolicy, optimizer: torch.optim.Optimizer,
                rollout: Rollout, generator: torch.Generator, update: bool) -> dict[str, float]:
    """All updates of one rollout (none when it is only measured), and its metrics by the names of `luspo train`."""
    groups = torch.arange(config.prompts).repeat_interleave(config.group_size)
    rewards = rollout.correct.double()
    advantages = group_advantages(rewards, groups)
    clipped, weights = torch.zeros_like(rewards), torch.zeros_like(rewards)
    norms, slopes = [], []
    if update:
        old = policy.table().detach()
        order = torch.randperm(config.prompts, generator=generator)
        for prompts in order.split(config.prompts_per_mini_batch):
            rows = (prompts[:, None] * config.group_size + torch.arange(config.group_size)).flatten()
            loss, statistics = _loss(config, variant, policy, old, rollout, advantages, rows)
            optimizer.zero_grad()
            loss.backward()
            assert policy.stop.grad is not None
            slopes.append(-float(policy.stop.grad[STOP]))
            norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP_GRAD)))
            optimizer.step()
            clipped[rows], weights[rows] = statistics["clipped"], statistics["token_weight"]
    measured = step_statistics(
        lengths=rollout.lengths, rewards=rewards, correct=rollout.correct, truncated=rollout.truncated,
        group_ids=groups, advantages=advantages, clipped=clipped if update else None,
        token_weights=weights if update else None)
    metrics = {ours: measured[theirs] for ours, theirs in STATISTICS_NAMES.items() if theirs in measured}
    return metrics | ({"gradient_norm": float(np.mean(norms)), "stop_slope": float(np.mean(slopes))} if update else {})


def _loss(config: LengthBiasConfig, variant: Variant, policy: TabularPolicy, old: Tensor, rollout: Rollout,
          advantages: Tensor, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The project's objective on the packed responses of one mini-batch, which is one micro-batch here."""
    tokens, cu_seqlens = rollout.pack(rows)
    return policy_objective(
        variant.algorithm, logprobs=policy.table()[tokens], old_logprobs=old[tokens], advantages=advantages[rows],
        cu_seqlens=cu_seqlens, response_mask=torch.ones_like(tokens, dtype=torch.bool), clip_low=variant.clip_low,
        clip_high=variant.clip_high, global_num_sequences=len(rows), global_num_tokens=len(tokens),
        max_response_length=config.max_response_tokens)


# ------------------------------------------------------------------------------------------------ all runs, in parallel
_told: Any = None  # the queue of a worker process


def _begin_worker(told: Any) -> None:
    global _told
    _told = told
    torch.set_num_threads(1)


def _work(config: LengthBiasConfig, variant: Variant, seed: int) -> Row:
    return run_one(config, variant, seed, _told.put)


def all_runs(config: LengthBiasConfig, on_steps: Callable[[int], None]) -> Iterator[Row]:
    """The rows as runs finish. One worker: in this process."""
    jobs = [(variant, seed) for seed in range(config.seeds) for variant in variants(config)]
    workers = min(config.workers or len(os.sched_getaffinity(0)), len(jobs))
    if workers == 1:
        for variant, seed in jobs:
            yield run_one(config, variant, seed, on_steps)
        return
    context = get_context("spawn")
    told = context.Queue()
    with ProcessPoolExecutor(workers, context, _begin_worker, (told,)) as pool:
        waiting: list[Future[Row]] = [pool.submit(_work, config, variant, seed) for variant, seed in jobs]
        try:
            while waiting:
                with contextlib.suppress(queue.Empty):
                    on_steps(told.get(timeout=0.5))
                done = [future for future in waiting if future.done()]
                waiting = [future for future in waiting if not future.done()]
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(config: LengthBiasConfig) -> int:
    from luspo_megatron.study.figures import write_figures
    from luspo_megatron.study.outcome import summary_lines
    from luspo_megatron.study.page import write_page

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    set_aside(out / RUNS_FILE)
    began, rows = time.monotonic(), []
    jobs = len(variants(config)) * config.seeds
    with Progress() as progress:
        progress.message(f"{jobs} runs of {config.steps} rollouts, task {config.task}; folder {out}")
        with progress.phase("rollouts", jobs * config.steps) as phase:
            for row in all_runs(config, phase.advance):
                rows.append(row)
                append_line(out / RUNS_FILE, row)
        write_json(out / STUDY_FILE, {"settings": asdict(config), "seconds": time.monotonic() - began})
        figures = write_figures(out, config, rows)
        page = write_page(out, config, rows)

        for line in summary_lines(config, rows):
            progress.message(line)
        cpu = sum(row["cpu_seconds"] for row in rows)
        progress.message(f"{len(rows)} runs in {time.monotonic() - began:.0f} s ({cpu:.0f} s of CPU time); {page}, "
                         f"{len(figures)} figures, {out / RUNS_FILE}")
    return 0
