"""`luspo train`: the loop. One step is rollout, reward, advantages, old log-probs, mini-batch updates, weight sync.

Read `train` top to bottom. Every rank runs it; rank 0 alone talks to the controller (rollouts and rewards) and to the
person (report). Left out here: asynchronous rollouts, rollout correction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luspo_megatron import hand_over, run
from luspo_megatron.config import Config, SftConfig
from luspo_megatron.launch.stop import install as install_stop
from luspo_megatron.types import Group


def main(config: Config) -> int:
    from luspo_megatron.preflight import check_train

    return run.start("luspo_megatron.trainer", config, config.run.dir, config.parallel.world_size, train, check_train)


def train(config: Config) -> None:
    """Trains to config.run.steps, or until asked to stop; resumes from the run folder's newest checkpoint."""
    from luspo_megatron.actor import checkpoint
    from luspo_megatron.actor.expert_load import load_metrics
    from luspo_megatron.actor.optimizer import learning_rate
    from luspo_megatron.actor.policy_loss import policy_loss
    from luspo_megatron.algorithm.advantages import group_advantages
    from luspo_megatron.data.schedule import build_mini_batches, plan_batches
    from luspo_megatron.step import gather_old_logprobs, step_metrics

    began = time.monotonic()
    install_stop()
    found = run.resume_from(config.run.dir, config.run.resume)
    ranks = run.join_ranks(config.model, config.parallel, config.run.seed)
    with contextlib.ExitStack() as stack:
        actor = run.build_actor(ranks, config.model, config.parallel, config.optimizer, config.batch, loss=config.loss,
                                temperature=config.rollout.temperature)
        reference = reference_policy(config, ranks)
        state: dict[str, Any] = {"step": 0, "updates": 0, "weight_version": 1}
        if found is not None:
            state |= checkpoint.load(actor, found)
        state["model"] = dataclasses.asdict(config.model)
        memory = shared_memory(config, ranks, actor, reference)
        desk = stack.enter_context(front_desk(config, ranks, state, found is not None, began))
        sync = stack.enter_context(contextlib.closing(weight_sync(config, actor, desk)))

        def push(again: Callable[[], None] | None) -> None:
            with desk.phase("sync"):
                desk.push(sync, state["weight_version"], again)

        engines = hand_over.AlwaysReady(push) if memory is None else hand_over.TakeTurns(memory, desk, push)
        engines.start()

        def evaluate(step: int, full: bool) -> bool:
            return not config.data.eval_prompts or engines.generating(lambda: desk.evaluate(step, full=full))

        done = state["step"]
        due = done == 0 or (state.get("evaluation_due") and not desk.evaluated(done))
        if due and not evaluate(done, full=done in (0, config.run.steps)):
            desk.stopped(done)  # what was saved says that this evaluation is due
            return
        state["evaluation_due"] = False
        multiple = ranks.layout.token_multiple(config.parallel.sequence_parallel)
        updates_per_step = config.algorithm.epochs * -(
            -config.rollout.prompts_per_step // config.algorithm.prompts_per_mini_batch)
        saved_step = state["step"]

        def save(step: int) -> None:
            nonlocal saved_step
            with desk.phase("save"):
                state["seconds"] = desk.seconds_so_far()
                saved = checkpoint.save(actor, run.checkpoints_of(config.run.dir), step, state, config.checkpoint.keep)
            desk.saved(step, saved)
            saved_step = step

        for step in range(state["step"] + 1, config.run.steps + 1):
            desk.begin(step)
            groups: list[Group] | None = engines.generating(lambda: desk.rollout(step))  # noqa: B023
            if groups is None:  # asked to stop: the rollout, which can take long, is given up and drawn again on resume
                if saved_step < step - 1:
                    save(step - 1)
                desk.stopped(step - 1)
                return
            samples = [sample for group in groups for sample in group.samples]
            group_ids = [sample.group_id for sample in samples]
            advantages = group_advantages(
                [sample.reward for sample in samples], group_ids, std=config.algorithm.advantage_std,
                ddof=config.algorithm.advantage_ddof, eps=config.algorithm.advantage_eps).numpy()
            plans = plan_batches(
                [sample.num_tokens for sample in samples], group_ids,
                response_lengths=[len(sample.response_ids) for sample in samples], dp=ranks.layout.dp,
                prompts_per_mini_batch=config.algorithm.prompts_per_mini_batch, epochs=config.algorithm.epochs,
                max_tokens=config.batch.max_tokens_per_micro_batch, multiple=multiple, seed=config.run.seed,
                rollout_id=step)
            mini_batches = build_mini_batches(plans, samples, ranks.dp_rank, multiple)
            with desk.phase("old_logprobs"):
                old = [actor.logprobs(mini_batch.micro_batches) or [] for mini_batch in mini_batches]
                ref = [reference.logprobs(m.micro_batches) or [] for m in mini_batches] if reference else None
            results = []
            with desk.phase("train", len(mini_batches)) as phase:
                for i, mini_batch in enumerate(mini_batches):
                    objective = policy_loss(
                        config.algorithm, mini_batch, advantages, old_logprobs=[logp for logp, _ in old[i]],
                        ref_logprobs=[logp for logp, _ in ref[i]] if ref else None,
                        max_response_tokens=config.rollout.max_response_tokens)
                    lr = learning_rate(config.optimizer, state["updates"], config.run.steps * updates_per_step)
                    results.append(actor.train_step(mini_batch, objective, lr))
                    state["updates"] += 1
                    phase.advance()
            state |= {"step": step, "weight_version": state["weight_version"] + 1}
            engines.trained()
            old_logprobs = gather_old_logprobs(ranks, mini_batches, old)
            expert_load = ranks.gather(actor.expert_load.take())
            desk.report(step, groups, lambda: load_metrics(expert_load) | step_metrics(  # noqa: B023
                samples, advantages, results, old_logprobs, lr=lr, weight_version=state["weight_version"]))  # noqa: B023

            stopping = run.stop_agreed(ranks)
            last = step == config.run.steps
            state["controller"] = desk.controller_state()
            due = last or bool(config.eval.every and step % config.eval.every == 0)
            if due and not stopping:
                stopping = not evaluate(step, full=last)
                due = stopping
            state["evaluation_due"] = due  # an evaluation that a request to stop leaves out is the resumed run's
            if last or stopping or (config.checkpoint.every and step % config.checkpoint.every == 0):
                save(step)
            if stopping:
                desk.stopped(step)
                return
        export = None
        if config.checkpoint.export_at_end:
            with desk.phase("save"):
                export = export_policy(config, actor, ranks)
        desk.finish(state, export)


def reference_policy(config: Config, ranks: Any) -> Any:
    """The frozen policy of the KL term, None without one."""
    if not config.algorithm.kl_coef:
        return None
    return run.build_actor(ranks, config.model, config.parallel, config.optimizer, config.batch,
                           loss=config.loss, temperature=config.rollout.temperature, trainable=False,
                           weights=config.model.ref_hf or None)


def shared_memory(config: Config, ranks: Any, *actors: Any) -> Any:
    """The trainer's memory where engines take turns with it, already handed over: the engines start next. Else None."""
    if not hand_over.hands_over(config.rollout, config.launch, actors[0].device.type == "cpu"):
        return None
    from luspo_megatron.actor.offload import ActorsMemory

    memory = ActorsMemory(*(actor for actor in actors if actor is not None))
    memory.offload_optimizer()
    memory.offload_actor()
    ranks.broadcast(None)  # rank 0 starts engines when the GPUs of all ranks are free
    return memory


def weight_sync(config: Config, actor: Any, desk: Any) -> Any:
    from luspo_megatron.weights.sync import WeightSync

    return WeightSync(actor.gpt, actor.table, actor.ranks, config.weight_sync, dtype=config.model.dtype,
                      device=actor.device, engines=desk.client, timeout=config.rollout.start_timeout,
                      folder=str(Path(config.run.dir) / "weights"), warn=desk.warn)


def front_desk(config: Config, ranks: Any, state: dict[str, Any], resumed: bool, began: float) -> Any:
    from luspo_megatron.desk import Desk

    return Desk(config, ranks, state, resumed=resumed, began=began)


def export_policy(config: Config | SftConfig, actor: Any, ranks: Any) -> Path:
    """<run>/export, anew; an earlier one stays until the new one is complete."""
    import shutil

    from luspo_megatron.weights.export import export_hf

    out = Path(config.run.dir) / "export"
    new = out.with_name("export.new")
    if ranks.rank == 0:
        shutil.rmtree(new, ignore_errors=True)
    export_hf(actor.gpt, actor.table, ranks, source_folder=config.model.hf, out=new, dtype=config.model.dtype)
    if ranks.rank == 0:
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)
    return out


if __name__ == "__main__":
    run.rank_main(Config, train)
