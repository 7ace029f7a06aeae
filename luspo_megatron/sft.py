"""`luspo sft`: supervised cold start on demonstrations, with the same actor, batches, checkpoints and export.

Read `sft` top to bottom. The loss is the token-mean cross-entropy over the responses of each batch.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from luspo_megatron import run
from luspo_megatron.config import SftConfig
from luspo_megatron.launch import stop

LINES = 10  # progress lines over a whole run


def main(config: SftConfig) -> int:
    from luspo_megatron.preflight import check_sft

    return run.start("luspo_megatron.sft", config, config.run.dir, config.parallel.world_size, sft, check_sft)


def sft(config: SftConfig) -> None:
    """Trains to config.run.steps optimizer steps, or until asked to stop; resumes from the newest checkpoint."""
    from luspo_megatron.actor import checkpoint
    from luspo_megatron.actor.optimizer import learning_rate
    from luspo_megatron.actor.policy_loss import supervised_loss
    from luspo_megatron.data.demonstrations import load_demonstrations
    from luspo_megatron.data.schedule import build_mini_batches, plan_batches
    from luspo_megatron.data.tokenizer import load_tokenizer
    from luspo_megatron.report.metrics import MetricSinks
    from luspo_megatron.report.progress import Progress
    from luspo_megatron.trainer import export_policy

    stop.install()
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.hf, config.model.hf)
    samples = [_Packable(d.prompt_ids, d.response_ids, [0.0] * len(d.response_ids))
               for d in load_demonstrations(config.data, tokenizer)]
    found = run.resume_from(config.run.dir, config.run.resume)
    ranks = run.join_ranks(config.model, config.parallel, config.run.seed)
    actor = run.build_actor(ranks, config.model, config.parallel, config.optimizer, config.batch, loss=config.loss)
    state: dict[str, Any] = {"step": 0}
    if found is not None:
        state |= checkpoint.load(actor, found)
    state["model"] = dataclasses.asdict(config.model)
    first, steps = state["step"], config.run.steps
    shown = ranks.rank == 0
    if shown:
        run.save_settings(config, config.run.dir)
    progress = Progress(max(0, steps - first), run_dir=config.run.dir) if shown else None
    sinks = MetricSinks(config.run.dir, config.run.tensorboard, first if found else None) if shown else None
    if progress is not None:
        progress.message(f"{len(samples)} demonstrations, layout {ranks.layout}; run folder {config.run.dir}")
    multiple = ranks.layout.token_multiple(config.parallel.sequence_parallel)
    window: list[tuple[float, float, int]] = []
    began = time.monotonic()

    for step in range(first + 1, steps + 1):
        chosen = batch_of(len(samples), config.batch_size, step, config.run.seed)
        batch = [samples[i] for i in chosen]
        plans = plan_batches(
            [len(s.prompt_ids) + len(s.response_ids) for s in batch], range(len(batch)),
            response_lengths=[len(s.response_ids) for s in batch], dp=ranks.layout.dp,
            prompts_per_mini_batch=len(batch), epochs=1, max_tokens=config.batch.max_tokens_per_micro_batch,
            multiple=multiple, seed=config.run.seed, rollout_id=step)
        [mini_batch] = build_mini_batches(plans, batch, ranks.dp_rank, multiple)
        lr = learning_rate(config.optimizer, step - 1, steps)
        result = actor.train_step(mini_batch, supervised_loss(mini_batch), lr)
        state["step"] = step
        if progress is not None and sinks is not None:
            window.append((result.sums["loss"], result.gradient_norm, mini_batch.global_num_tokens))
            progress._run.advance(1)
            if step % max(1, steps // LINES) == 0 or step == steps:
                loss, norm, tokens = (float(np.mean(column)) for column in zip(*window, strict=True))
                rate = tokens * len(window) / (time.monotonic() - began)
                sinks.write(step, {"loss": loss, "gradient_norm": norm, "lr": lr, "tokens_per_second": rate})
                progress.message(f"step {step}/{steps}  loss {loss:.4f}  gradient norm {norm:.2f}  lr {lr:.1e}  "
                                 f"{rate:.0f} response tokens/s")
                window, began = [], time.monotonic()
        stopping = run.stop_agreed(ranks)
        if stopping or step == steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
            saved = checkpoint.save(actor, run.checkpoints_of(config.run.dir), step, state, config.checkpoint.keep)
            if progress is not None:
                progress.message(f"saved {saved}")
        if stopping and step < steps:
            stop.mark()
            if progress is not None:
                command = run.resume_command("sft", config.run.dir)
                progress.message(f"stopped after step {step}; to go on: {command}")
            break
    else:
        if config.checkpoint.export_at_end:
            out = export_policy(config, actor, ranks)
            if progress is not None:
                progress.message(f"exported {out}")
    if progress is not None and sinks is not None:
        sinks.close()
        progress.close()


@dataclasses.dataclass(frozen=True)
class _Packable:
    """A demonstration as the packer sees it; there was no rollout, so its log-probs are 0."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: list[float]


def batch_of(count: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Indices of the batch of a step (from 1): consecutive parts of the epochs' permutations, endless.

    A pure function of the step, so that a resumed run draws the same batches.
    """
    out: list[int] = []
    position = (step - 1) * batch_size
    while len(out) < batch_size:
        epoch, offset = divmod(position + len(out), count)
        order = np.random.default_rng([seed, epoch]).permutation(count)
        out += order[offset : offset + batch_size - len(out)].tolist()
    return out


if __name__ == "__main__":
    run.rank_main(SftConfig, sft)
