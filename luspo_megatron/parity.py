"""`luspo parity`: Hugging Face, actor and engines on the same weights and the same tokens.

The actor starts in the given layout and pushes its weights; the engines sample; transformers and the actor compute the
log-probs of what was sampled, at the sampling temperature. Checksums of every tensor tell differing weights from
differing numerics (report/parity.py). Exit code 1 when something differs by more than the tolerance.

Left out: per-tensor checksums of engines that store fused tensors; transformers runs in rank 0's process, on the CPU,
and needs the whole model in its memory (`--reference false` leaves it out).
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from luspo_megatron import run
from luspo_megatron.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    ParityConfig,
    RewardConfig,
    RunConfig,
)
from luspo_megatron.errors import RunError
from luspo_megatron.types import Sample

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05}
ACTOR, REFERENCE = "actor", "Hugging Face"


def main(config: ParityConfig) -> int:
    from luspo_megatron.preflight import check_weights

    return run.start("luspo_megatron.parity", config, config.out, config.parallel.world_size, parity,
                     lambda c: check_weights(c.model.hf))


def parity(config: ParityConfig) -> None:
    """Every rank. RunError when something differs; rank 0 prints the report and writes <out>/parity.json."""
    from luspo_megatron.weights.sync import WeightSync

    ranks = run.join_ranks(config.model, config.parallel, config.seed)
    with contextlib.ExitStack() as stack:
        actor = run.build_actor(ranks, config.model, config.parallel, OptimizerConfig(), config.batch,
                                temperature=config.rollout.temperature, trainable=False)
        client = _controller(config, stack) if ranks.rank == 0 else None
        if config.push:
            sync = WeightSync(actor.gpt, actor.table, ranks, config.weight_sync, dtype=config.model.dtype,
                              device=actor.device, engines=client, timeout=config.rollout.start_timeout,
                              folder=str(Path(config.out) / "weights"))
            stack.enter_context(contextlib.closing(sync))
            sync.push(1)
        groups = ranks.broadcast(client.next_batch(1) if client is not None else None)
        samples = [sample for group in groups for sample in group.samples]
        ours = actor_logprobs(actor, samples, config)
        checksums = actor_checksums(actor, config.model.dtype)
        wrong = None
        if client is not None:
            wrong = _report(config, actor, samples, ours, checksums, client.call("weights_checksums"))
        if (wrong := ranks.broadcast(wrong)) is not None:
            raise RunError(wrong)


def _controller(config: ParityConfig, stack: contextlib.ExitStack) -> Any:
    """The controller with its engines, asked for one small rollout of random prompts (or of data.prompts)."""
    from dataclasses import replace

    from luspo_megatron.config_io import save_config
    from luspo_megatron.data.probe import REWARD, SOURCE
    from luspo_megatron.rollout.client import ControllerClient

    own = bool(config.data.prompts)
    data = config.data if own else replace(DataConfig(), prompts=SOURCE, size=config.prompts)
    settings = Config(
        run=RunConfig(dir=config.out, seed=config.seed), model=config.model, parallel=config.parallel, data=data,
        rollout=replace(config.rollout, prompts_per_step=config.prompts, group_size=config.samples,
                        dynamic_sampling=False),
        reward=RewardConfig(terms=(REWARD,)), algorithm=AlgorithmConfig(prompts_per_mini_batch=config.prompts),
        batch=config.batch, weight_sync=config.weight_sync)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="luspo-")))
    save_config(settings, folder / "config.yaml")
    return stack.enter_context(ControllerClient.start(folder / "config.yaml", Path(config.out)))


def actor_logprobs(actor: Any, samples: list[Sample], config: ParityConfig) -> list[np.ndarray] | None:
    """[response tokens] of each sample at the actor's temperature, on rank 0."""
    from luspo_megatron.data.schedule import build_mini_batches, plan_batches
    from luspo_megatron.step import gather_old_logprobs

    ranks = actor.ranks
    multiple = ranks.layout.token_multiple(config.parallel.sequence_parallel)
    plans = plan_batches(
        [sample.num_tokens for sample in samples], [sample.group_id for sample in samples],
        response_lengths=[len(sample.response_ids) for sample in samples], dp=ranks.layout.dp,
        prompts_per_mini_batch=config.prompts, epochs=1, max_tokens=config.batch.max_tokens_per_micro_batch,
        multiple=multiple, seed=config.seed, rollout_id=1)
    mini_batches = build_mini_batches(plans, samples, ranks.dp_rank, multiple)
    outputs = [actor.logprobs(mini_batch.micro_batches) or [] for mini_batch in mini_batches]
    found = gather_old_logprobs(ranks, mini_batches, outputs)
    return [found[i] for i in range(len(samples))] if ranks.rank == 0 else None


def reference_logprobs(folder: str, samples: list[Sample], dtype: str, temperature: float) -> list[np.ndarray]:
    """The same by transformers, one sequence at a time, in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the grouped kernels need newer hardware than a CPU may be
    out = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].double()
            rows = torch.log_softmax(logits / (temperature or 1.0), -1)
            out.append(rows.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0].numpy())
    return out


def checksum(tensor: Any) -> str:
    """xxh3_64 of a tensor's bytes, hexadecimal."""
    import torch
    import xxhash

    return xxhash.xxh3_64_hexdigest(tensor.detach().contiguous().cpu().clone().view(torch.uint8).numpy())


def actor_checksums(actor: Any, dtype: str) -> dict[str, str]:
    """Of every Hugging Face tensor gathered from the actor's shards, on rank 0; empty elsewhere."""
    import torch

    from luspo_megatron.weights.gather import ShardGatherer
    from luspo_megatron.weights.plan import plan_sync

    plan = plan_sync(actor.table, actor.ranks.layout, dtype, 512 * 2**20)
    own: dict[str, str] = {}
    for _, tensors in ShardGatherer(actor.gpt, actor.table, actor.ranks).walk(plan, getattr(torch, dtype)):
        own.update({name: checksum(tensor) for name, tensor in (tensors or {}).items()})
    parts = actor.ranks.gather(own)
    return {name: value for part in parts or () for name, value in part.items()}


def folder_checksums(folder: str, names: Any, dtype: str) -> dict[str, str]:
    """Of the tensors on disk, converted to ``dtype``. A tied head that is written all the same is left out."""
    import torch

    from luspo_megatron.weights.load import HfCheckpoint

    files = HfCheckpoint(folder)
    return {name: checksum(files[name].to(getattr(torch, dtype))) for name in names}


def _report(config: ParityConfig, actor: Any, samples: list[Sample], ours: list[np.ndarray] | None,
            checksums: dict[str, str], engines: dict[str, dict[str, str] | None]) -> str | None:
    """Prints and writes the report; the message of a failed parity, None for a good one."""
    from luspo_megatron.report.parity import compare_logprobs, compare_weights, verdict

    assert ours is not None
    rollout = [np.asarray(sample.rollout_logprobs) for sample in samples]
    kind = config.rollout.engine
    checks = [(compare_weights(ACTOR, name, checksums, theirs),
               compare_logprobs(ACTOR, f"{kind} engine", ours, rollout))
              for name, theirs in sorted(engines.items())]
    if config.reference:
        reference = reference_logprobs(config.model.hf, samples, config.model.dtype, config.rollout.temperature)
        on_disk = folder_checksums(config.model.hf, actor.table.hf_shapes, config.model.dtype)
        checks.insert(0, (compare_weights(REFERENCE, ACTOR, on_disk, checksums),
                          compare_logprobs(REFERENCE, ACTOR, reference, ours)))
    tolerance = config.tolerance or TOLERANCES[config.model.dtype]
    text, good = verdict(checks, tolerance)
    print(f"parity of {config.model.hf}, {config.model.dtype}, layout {actor.ranks.layout}, {len(samples)} samples at "
          f"temperature {config.rollout.temperature:g}\n{text}", flush=True)
    path = Path(config.out) / "parity.json"
    path.write_text(json.dumps({
        "good": good, "tolerance": tolerance, "layout": str(actor.ranks.layout),
        "checks": [{"weights": {**vars(weights), "equal": weights.equal}, "numerics": vars(numerics)}
                   for weights, numerics in checks]}, indent=1) + "\n")
    return None if good else f"no parity; the whole report is in {path}"


if __name__ == "__main__":
    sys.exit(run.rank_main(ParityConfig, parity))
