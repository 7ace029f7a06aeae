"""The controller: one process per run that owns prompts, engines, rewards and groups. No torch, no megatron.

Trainer rank 0 starts it and talks to it over a Unix socket (client.py). It answers plain data; tensors go straight
from trainer ranks to engines. Rollouts are synchronous: every sample of a step is drawn under one weight version, and
a sample from another version is an error. Its state (data position, group counter, weight version) is part of a
checkpoint. Between steps there are no pending samples, so none are kept. Left out: asynchronous rollouts.

controller_server.py is the process around it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luspo_megatron.config import Config
from luspo_megatron.data.prompts import PromptStream, load_prompts
from luspo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from luspo_megatron.errors import RunError
from luspo_megatron.launch.allocation import default_registry
from luspo_megatron.reward.base import RewardInput
from luspo_megatron.reward.pool import RewardPool
from luspo_megatron.rollout.engine import GenerateRequest, Generation, load_engine_kind
from luspo_megatron.rollout.fleet import Fleet
from luspo_megatron.rollout.sampling import SamplingPlan, all_equal, mean_length, pass_rates
from luspo_megatron.rollout.starter import with_hand_over
from luspo_megatron.rollout.wire import group_to_dict
from luspo_megatron.types import Group, Prompt, Sample

Progress = Callable[[str, int, int], None]
Json = dict[str, Any]


def routing_of(model: str) -> tuple[int, int] | None:
    """(layers, experts per token) of a Mixture-of-Experts model's folder; None for a dense one."""
    config = json.loads((Path(model) / "config.json").read_text()) if model else {}
    topk = config.get("num_experts_per_tok")
    return (int(config["num_hidden_layers"]), int(topk)) if topk else None


def registry_of(config: Config, run_dir: Path) -> Path | None:
    """Where supervisors make engines known; None: the run starts its engines itself, or was given URLs."""
    if config.rollout.urls:
        return None
    if config.rollout.registry:
        return Path(config.rollout.registry)
    return default_registry(run_dir) if config.launch.engine_nodes else None


def quiet(phase: str, done: int, total: int) -> None:
    """No progress is wanted."""


class Controller:
    """The methods named in ``METHODS`` are what the client may call; parameters and results are JSON-able."""

    METHODS = ("next_batch", "evaluate", "connect_weights", "update_weights", "weights_status",
               "weights_checksums", "sleep", "wake", "state", "load_state")

    def __init__(self, config: Config, fleet: Fleet, rewards: RewardPool, tokenizer: TextTokenizer,
                 train_prompts: list[Prompt], eval_prompts: list[Prompt]) -> None:
        self.config, self.fleet, self.rewards, self.tokenizer = config, fleet, rewards, tokenizer
        self.stream = PromptStream(train_prompts, config.run.seed, config.data.shuffle) if train_prompts else None
        self.eval_prompts = eval_prompts
        self.next_group_id = 0
        self.least_version = 0  # a resumed run's engines must have been pushed this version before they sample

    @classmethod
    async def build(cls, config: Config, run_dir: Path) -> Controller:
        """Read the data, start engines and reward workers. Raises UserError or RunError, with nothing left running."""
        kind = load_engine_kind(config.rollout.engine)
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.hf, config.model.hf)
        seed = config.run.seed
        train: list[Prompt] = load_prompts(config.data, tokenizer, "train", seed) if config.data.prompts else []
        held_out: list[Prompt] = load_prompts(config.data, tokenizer, "eval", seed) if config.data.eval_prompts else []
        rewards = RewardPool(config.reward)
        fleet = Fleet(with_hand_over(config), kind, model=config.model.hf, dtype=config.model.dtype,
                      folder=run_dir / "logs",
                      verify=config.weight_sync.verify == "full", routing=routing_of(config.model.hf),
                      max_length=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
                      registry=registry_of(config, run_dir))
        try:
            await asyncio.gather(asyncio.to_thread(rewards.start), fleet.start())
        except BaseException:
            await fleet.close()
            rewards.close()
            raise
        return cls(config, fleet, rewards, tokenizer, train, held_out)

    async def close(self) -> None:
        await self.fleet.close()
        await asyncio.to_thread(self.rewards.close)

    # ---- rollouts --------------------------------------------------------------------------------------------

    async def next_batch(self, rollout_id: int, progress: Progress = quiet) -> Json:
        """The groups of one rollout step, rewards filled in, in the order of their prompts; and its statistics.

        With dynamic sampling, groups of equal rewards make room for more prompts, at most max_extra_rounds times;
        what is still missing then is filled with such groups again (their advantages are 0), so that the size of a
        step never changes.
        """
        if self.stream is None:
            raise RunError("no training prompts: data.prompts is not set")
        rollout, before = self.config.rollout, self._totals()
        plan = self._plan("rollout", self.config.run.seed, rollout_id, rollout.group_size, rollout.temperature,
                          rollout.top_p)
        start = time.monotonic()
        kept: list[Group] = []
        spare: list[Group] = []
        sampled = rounds = 0
        while True:
            prompts = self.stream.next(rollout.prompts_per_step - len(kept))
            groups = await self._sample(plan, prompts, sampled, progress)
            sampled += len(prompts)
            dynamic = rollout.dynamic_sampling
            spare += [group for group in groups if dynamic and all_equal(group)]
            kept += [group for group in groups if not (dynamic and all_equal(group))]
            if len(kept) == rollout.prompts_per_step or rounds == rollout.max_extra_rounds:
                break
            rounds += 1
        filled = rollout.prompts_per_step - len(kept)
        groups = sorted(kept + spare[:filled], key=lambda group: group.group_id)
        statistics = {
            "rollout_seconds": time.monotonic() - start,
            "rollout_prompts": float(sampled),
            "dynamic_rounds": float(rounds),
            "dynamic_dropped": float(len(spare) - filled),
            "dynamic_filled": float(filled),
            **{name: float(value - before[name]) for name, value in self._totals().items()},
        }
        return {"groups": [group_to_dict(group) for group in groups], "statistics": statistics}

    def _totals(self) -> Counter[str]:
        """Counters over the process's life; a step reports its own share."""
        rewards = {f"reward_{name}": count for name, count in self.rewards.counts.items() if name != "scored"}
        fleet = {"retries": self.fleet.counts["retries"], "engine_restarts": self.fleet.counts["engine_restarts"]}
        return Counter({**rewards, **fleet})

    def _plan(self, purpose: str, seed: int, step: int, samples: int, temperature: float, top_p: float) -> SamplingPlan:
        rollout = self.config.rollout
        return SamplingPlan(purpose, seed, step, samples, temperature, top_p, rollout.max_response_tokens,
                            self.tokenizer.eos_ids, rollout.batch_size)

    async def _sample(self, plan: SamplingPlan, prompts: list[Prompt], first_index: int, progress: Progress,
                      count_groups: bool = True) -> list[Group]:
        """Draw and grade ``plan.samples`` responses per prompt. A chunk is graded while others are generated."""
        version = self.fleet.weight_version
        if version < self.least_version:
            raise RunError(f"the run was resumed at weight version {self.least_version}, but the engines have "
                           f"{version}: push the weights before sampling")
        first_id = self.next_group_id if count_groups else 0
        groups = [Group(first_id + index, prompt, []) for index, prompt in enumerate(prompts)]
        if count_groups:
            self.next_group_id += len(prompts)
        done, total = 0, len(prompts) * plan.samples
        progress(plan.purpose, 0, total)

        async def one(members: list[tuple[int, int]], request: GenerateRequest) -> list[tuple[int, Sample]]:
            nonlocal done
            answers = await self.fleet.generate(request)
            samples = [(p, self._to_sample(groups[p], s, answer, version))
                       for (p, s), answer in zip(members, answers, strict=True)]
            await self._grade([(groups[p].prompt, sample) for p, sample in samples])
            done += len(samples)
            progress(plan.purpose, done, total)
            return samples

        tasks = [asyncio.create_task(one(members, request)) for members, request in plan.chunks(prompts, first_index)]
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for part in results:  # in the order of the chunks, so samples stand in order
            for position, sample in part:
                groups[position].samples.append(sample)
        return groups

    def _to_sample(self, group: Group, sample_index: int, answer: Generation, version: int) -> Sample:
        span = (answer.weight_version_start, answer.weight_version_end)
        in_flight = self.config.rollout.in_flight_updates and version <= span[0] <= span[1] <= self.fleet.weight_version
        if span != (version, version) and not in_flight:
            raise RunError(f"a sample of group {group.group_id} was drawn under weight versions {span[0]} to "
                           f"{span[1]}, expected {version}: the engine's weights are not the actor's")
        if len(answer.logprobs) != len(answer.response_ids):
            raise RunError(f"an engine gave {len(answer.logprobs)} log-probs for {len(answer.response_ids)} tokens")
        return Sample(
            group_id=group.group_id,
            sample_index=sample_index,
            prompt_ids=list(group.prompt.prompt_ids),
            response_ids=answer.response_ids,
            rollout_logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            weight_version_start=span[0],
            weight_version_end=span[1],
            routed_experts=answer.routed_experts,
            response_text=self.tokenizer.decode(answer.response_ids),
        )

    async def _grade(self, pairs: list[tuple[Prompt, Sample]]) -> None:
        results = await self.rewards.score([
            RewardInput(prompt.text, sample.response_text, prompt.row, len(sample.response_ids), sample.truncated,
                        self.config.rollout.max_response_tokens)
            for prompt, sample in pairs
        ])
        for (_, sample), result in zip(pairs, results, strict=True):
            sample.reward, sample.reward_parts, sample.correct = result.reward, dict(result.parts), result.correct

    async def evaluate(self, samples: int, temperature: float, greedy: bool, size: int, seed: int,
                       progress: Progress = quiet) -> Json:
        """Held-out prompts (the first ``size``; 0: all) x ``samples`` at ``temperature`` with top_p 1.

        pass_at_1, pass_at_1_se (standard error over prompts), pass_at_k (k = samples), greedy (absent when not
        wanted), mean_length (tokens), reward, truncated (share), n (prompts).
        """
        if not self.eval_prompts:
            raise RunError("no held-out prompts: data.eval_prompts is not set")
        prompts = self.eval_prompts[: size or None]
        plan = self._plan("eval", seed, 0, samples, temperature, 1.0)
        groups = await self._sample(plan, prompts, 0, progress, count_groups=False)
        drawn = [sample for group in groups for sample in group.samples]
        result = {
            **pass_rates([[sample.correct for sample in group.samples] for group in groups]),
            "mean_length": mean_length(drawn),
            "reward": sum(sample.reward for sample in drawn) / len(drawn),
            "truncated": sum(sample.truncated for sample in drawn) / len(drawn),
            "n": float(len(prompts)),
        }
        if greedy:
            plan = self._plan("eval_greedy", seed, 0, 1, 0.0, 1.0)
            groups = await self._sample(plan, prompts, 0, progress, count_groups=False)
            result["greedy"] = sum(group.samples[0].correct for group in groups) / len(groups)
        return result

    # ---- weights and state -----------------------------------------------------------------------------------

    async def weights_status(self, version: int | None = None) -> Json:
        """What a push of ``version`` would find; None: of the next one."""
        fleet = self.fleet
        return {"version": fleet.weight_version, "num_workers": fleet.workers(version),
                "needs_connect": fleet.must_connect(version), "generation": fleet.generation}

    async def connect_weights(self, store_host: str, store_port: int, generation: int, sources: list[int],
                              world_size: int, timeout: float, version: int | None = None, **how: str) -> None:
        await self.fleet.connect_weights(store_host, store_port, generation, tuple(sources), world_size, timeout,
                                         version, **how)

    async def update_weights(self, manifest: Json) -> None:
        await self.fleet.update_weights(manifest)

    async def sleep(self) -> None:
        await self.fleet.sleep()

    async def wake(self, what: str) -> None:
        await self.fleet.wake(what)

    async def weights_checksums(self) -> Json:
        """{engine: {tensor: checksum}}; None for an engine whose kind gives none per tensor (on-disk names)."""
        asked = {slot.name: getattr(slot.client, "weights_checksums", None) for slot in self.fleet.slots if slot.ready}
        return {name: await ask() if ask is not None else None for name, ask in asked.items()}

    async def state(self) -> Json:
        """Take it between steps only. ``weight_version`` is what the engines hold."""
        return {"data": self.stream.state() if self.stream else None, "next_group_id": self.next_group_id,
                "weight_version": self.fleet.weight_version}

    async def load_state(self, state: Json) -> None:
        """Go on from a checkpoint. The engines still have the weights they started with: push before sampling."""
        if self.stream is not None and state["data"] is not None:
            self.stream.load_state(state["data"])
        self.next_group_id, self.least_version = int(state["next_group_id"]), int(state["weight_version"])
