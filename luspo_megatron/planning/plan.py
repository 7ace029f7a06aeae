"""`luspo plan`: what a configuration would take, before anything is asked of a cluster.

    luspo plan recipe.yaml --nodes 4 --gpu-memory 80
    luspo plan --config recipe.yaml --model.hf /models/Qwen3-30B-A3B --json

Every violation is listed with its mend; with none that concerns the layout the rank grid, the batch plan, the memory of
every stage, the weight-sync plan and an estimate of a step follow. Files that are not on this machine are a note, not a
violation, except the model's config.json. Exit code 0: it can start and fits; 1: it does not fit; 2: violations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from luspo_megatron import config_checks
from luspo_megatron.config import Config
from luspo_megatron.config_checks_rollout import Violation
from luspo_megatron.config_io import load_config
from luspo_megatron.errors import UserError
from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.planning import work
from luspo_megatron.planning.batches import BatchPlan, batch_plan, draw_lengths, parse_percentiles
from luspo_megatron.planning.engines import EngineMemory, engine_memory, places
from luspo_megatron.planning.memory import MARGIN, TrainerMemory, trainer_memory
from luspo_megatron.planning.sizes import StageSizes, stage_sizes, whole_model
from luspo_megatron.planning.text import render
from luspo_megatron.weights.architecture import Architecture, read_architecture
from luspo_megatron.weights.plan import SyncPlan, plan_sync
from luspo_megatron.weights.table import WeightTable

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What the plan is made for. ``nodes`` 0: as many as the run needs; sizes in bytes."""

    nodes: int = 0
    gpus_per_node: int = 0
    gpu_memory: int = 80 * GIB
    host_memory: int = 1000 * GIB
    prompt_tokens: int = 0
    percentiles: str = ""
    fused: bool = True
    rates: work.Rates = work.Rates()


def main(argv: Sequence[str]) -> int:
    """The command."""
    options, rest = _parser().parse_known_args(argv)
    if rest and not rest[0].startswith("-"):
        rest = ["--config", *rest]
    config = load_config(Config, rest, prog="luspo plan", description="(flags of luspo train)")
    rates = replace(work.Rates(), peak_flops=options.peak_tflops * 1e12, mfu=options.mfu,
                    link_bytes=options.link_gigabytes * 1e9, memory_bandwidth=options.memory_terabytes * 1e12)
    machine = Machine(options.nodes, options.gpus_per_node, int(options.gpu_memory * GIB),
                      int(options.host_memory * GIB), options.prompt_tokens, options.percentiles,
                      not options.local_spec and config.model.transformer_engine != "off", rates)
    plan = make_plan(config, machine)
    print(json.dumps(plan, indent=1) if options.json else render(plan))
    sys.stdout.flush()
    return UserError.exit_code if plan["violations"] else int(not plan["fits"])


def make_plan(config: Config, machine: Machine) -> dict[str, Any]:
    """The plan as JSON data: violations, notes and, where the layout stands, everything else. Sizes in bytes."""
    found, notes, facts = _violations(config)
    nodes, gpus = _nodes(config, machine, found)
    plan: dict[str, Any] = {"violations": [str(v) for v in found], "notes": notes, "fits": False}
    if facts is None or any(v.flag.startswith(("--parallel.", "--model.hf")) for v in found):
        return plan
    try:
        table = WeightTable(facts)
        plan |= _details(config, machine, table, nodes, gpus, notes)
    except UserError as error:
        plan["violations"].append(str(error))
    notes += config_checks.warnings(config, facts)
    return plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="luspo plan", allow_abbrev=False,
        usage="luspo plan [CONFIG] [--nodes N] [--gpus-per-node N] [--gpu-memory GIB] [FLAGS]",
        description="Check a configuration and show what it takes, without a GPU.",
        epilog="CONFIG is a YAML file; all flags of luspo train are taken too (luspo train --help).")
    add = parser.add_argument
    add("--nodes", type=int, default=0, help="nodes of the job (default: as many as it needs)")
    add("--gpus-per-node", type=int, default=0, help="default: launch.gpus_per_node")
    add("--gpu-memory", type=float, default=80, help="GiB of one GPU (default 80)")
    add("--host-memory", type=float, default=1000, help="GiB of one node (default 1000)")
    add("--percentiles", default="", help="response lengths as percent:tokens, e.g. 50:2000,95:8000,100:16000")
    add("--prompt-tokens", type=int, default=0, help="mean prompt (default: a quarter of data.max_prompt_tokens)")
    add("--local-spec", action="store_true", help="without Transformer Engine: its layers keep less")
    add("--peak-tflops", type=float, default=989, help="of one GPU at the parameters' dtype (default 989)")
    add("--mfu", type=float, default=0.3, help="share of it that training reaches (default 0.3)")
    add("--memory-terabytes", type=float, default=3.35, help="TB/s of a GPU's memory (default 3.35)")
    add("--link-gigabytes", type=float, default=50, help="GB/s of a GPU's link (default 50)")
    add("--json", action="store_true", help="print the plan as JSON")
    return parser


def _violations(config: Config) -> tuple[list[Violation], list[str], Architecture | None]:
    """(violations, notes on absent files, facts)."""
    facts = None
    found: list[Violation] = []
    try:
        facts = read_architecture(config.model.hf, config.model.family) if config.model.hf else None
    except UserError as error:
        found.append(Violation("--model.hf", config.model.hf, str(error)))
    notes = []
    for violation in config_checks.validate(config, facts):
        absent = "there is no such" in violation.mend
        if violation.flag == "--model.hf" and facts is None:
            if not found:
                found.append(violation)
        elif absent:
            notes.append(f"{violation.flag} {violation.value}: not on this machine; needed where the run starts")
        else:
            found.append(violation)
    return found, notes, facts


def _nodes(config: Config, machine: Machine, found: list[Violation]) -> tuple[int, int]:
    """(trainer nodes, GPUs per node), with what is wrong about them added to ``found``."""
    world = config.parallel.world_size
    gpus = machine.gpus_per_node or min(config.launch.gpus_per_node, max(1, world))
    trainers = max(1, -(-world // gpus))
    if trainers > 1 and world % gpus:
        found.append(Violation("--parallel.world_size", world, f"does not fill nodes of {gpus} GPUs; take a multiple"))
    nodes = machine.nodes or trainers + config.launch.engine_nodes
    if trainers + config.launch.engine_nodes > nodes:
        mend = (f"needs {trainers} nodes of {gpus} GPUs, and launch.engine_nodes {config.launch.engine_nodes}; "
                f"{nodes} are given; take fewer ranks or more nodes")
        found.append(Violation("--parallel.world_size", world, mend))
    if config.parallel.tp > gpus:
        mend = f"tensor parallelism across nodes of {gpus} GPUs is very slow; take at most {gpus}"
        found.append(Violation("--parallel.tp", config.parallel.tp, mend))
    return trainers, gpus


def _details(config: Config, machine: Machine, table: WeightTable, nodes: int, gpus: int,
             notes: list[str]) -> dict[str, Any]:
    layout = config_checks.resolve_layout(config.parallel, table.arch)
    sizes = stage_sizes(table, layout, distributed_optimizer=config.parallel.distributed_optimizer,
                        frozen_router=config.model.trainable == "no_router")
    prompt = machine.prompt_tokens or max(1, config.data.max_prompt_tokens // 4)
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    points = parse_percentiles(machine.percentiles, config.rollout.max_response_tokens)
    responses = draw_lengths(points, samples, config.run.seed)
    batches = batch_plan(config, layout, responses, prompt)
    if batches.mini_batches == 1 and config.algorithm.epochs == 1:
        notes.append("one update per rollout: the ratio is 1 and the clip never acts; lower prompts_per_mini_batch")
    sync = plan_sync(table, layout, config.model.dtype, config.weight_sync.bucket_bytes)
    largest = max(bucket.nbytes for unit in sync.units for bucket in unit.buckets)
    trainers = [trainer_memory(
        table.arch, layout, stage, model=config.model, parallel=config.parallel, optimizer=config.optimizer,
        batch=config.batch, loss=config.loss, num_microbatches=batches.micro_batches_max, bucket_bytes=largest,
        reference=config.algorithm.kl_coef > 0, fused=machine.fused) for stage in sizes]
    engine_gpus = (config.launch.engine_nodes or nodes) * gpus
    engine = engine_memory(config, table, machine.gpu_memory, engine_gpus)
    moments = _moments(config, machine, layout, trainers, engine, largest)
    parameters, tensors = whole_model(table)
    # a trainer that lends its GPU to engines keeps parameters and optimizer in pinned host memory meanwhile
    lent = max(m.parameters + m.optimizer for m in trainers) if engine is not None and engine.takes_turns else 0
    host = min(gpus, layout.world_size) * (max(m.host for m in trainers) + lent)
    return {
        "model": {"architecture": table.arch.family, "parameters": parameters, "tensors": tensors,
                  "active_parameters": work.active_parameters(table)},
        "layout": {**vars(layout), "dp": layout.dp, "edp": layout.edp, "nodes": nodes, "gpus_per_node": gpus,
                   "engine_nodes": config.launch.engine_nodes},
        "grid": rank_grid(layout, gpus), "batch": asdict(batches) | {"percentiles": points, "prompt_tokens": prompt},
        "stages": [_stage(stage, memory) for stage, memory in zip(sizes, trainers, strict=True)],
        "engine": None if engine is None else asdict(engine),
        "places": [asdict(place) for place in
                   places(engine, nodes, config.launch.engine_nodes, gpus)] if engine else [], "moments": moments,
        "gpu_memory": machine.gpu_memory, "margin": MARGIN, "host_per_node": host, "host_memory": machine.host_memory,
        "fits": all(m["fits"] for m in moments) and host <= machine.host_memory and (
            engine is None or engine.cache_tokens >= prompt + config.rollout.max_response_tokens),
        "sync": _sync(sync, engine), "step": _estimate(config, machine, table, batches, responses, prompt, layout,
                                                       engine, sync),
    }


def _stage(stage: StageSizes, memory: TrainerMemory) -> dict[str, Any]:
    return {"stage": stage.stage, "layers": stage.layers, "numel": stage.numel, **memory.to_dict()}


def rank_grid(layout: ParallelLayout, gpus: int) -> list[dict[str, Any]]:
    """One row per node: its ranks and the coordinates they span, as (first, last)."""
    rows = []
    for first in range(0, layout.world_size, gpus):
        ranks = range(first, min(first + gpus, layout.world_size))
        places = [layout.dense_coordinate(r) | {"ep": layout.expert_coordinate(r)["ep"]} for r in ranks]
        spans = {name: (min(p[name] for p in places), max(p[name] for p in places)) for name in places[0]}
        rows.append({"ranks": (ranks[0], ranks[-1]), **spans})
    return rows


def _moments(config: Config, machine: Machine, layout: ParallelLayout, trainers: Sequence[TrainerMemory],
             engine: EngineMemory | None, bucket: int) -> list[dict[str, Any]]:
    """The moments of a step at which a GPU is fullest, each with the bytes and whether they fit."""
    limit = machine.gpu_memory - MARGIN
    training, syncing = max(m.training for m in trainers), max(m.syncing for m in trainers)
    rows = [("train", training, limit), ("sync", syncing, limit)]
    if engine is not None and engine.takes_turns:
        # While weights are pushed the engine holds its weights, and the trainer no optimizer and gradients.
        pushing = max(m.parameters + m.sync_buckets for m in trainers) + engine.weights + bucket
        rows = [("train", training, limit), ("sync", pushing, limit),
                ("generate", engine.total + 2 * bucket, machine.gpu_memory)]
    elif engine is not None and engine.colocated:
        idle = max(m.states + m.reference for m in trainers)
        rows = [("train", training + engine.total, limit), ("sync", syncing + engine.total + bucket, limit),
                ("generate", idle + engine.total + 2 * bucket, limit)]
    elif engine is not None:
        rows.append(("generate", engine.total + 2 * bucket, machine.gpu_memory))
    return [{"moment": name, "bytes": int(size), "limit": int(most), "fits": size <= most} for name, size, most in rows]


def _sync(sync: SyncPlan, engine: EngineMemory | None) -> dict[str, Any]:
    buckets = [bucket for unit in sync.units for bucket in unit.buckets]
    sent = Counter({source: 0 for source in sync.sources})
    for bucket in buckets:
        sent[bucket.source] += bucket.nbytes
    return {"bytes": sum(sent.values()), "buckets": len(buckets), "largest": max(b.nbytes for b in buckets),
            "sources": len(sent), "bytes_of_source": [min(sent.values()), max(sent.values())],
            "receivers": 0 if engine is None else engine.engines * engine.layout.workers}


def _estimate(config: Config, machine: Machine, table: WeightTable, batches: BatchPlan, responses: Sequence[int],
              prompt: int, layout: ParallelLayout, engine: EngineMemory | None, sync: SyncPlan) -> dict[str, Any]:
    seconds, running = 0.0, 0
    if engine is not None:
        share = work.EngineShare(engine.engines, engine.layout.workers, engine.weights * engine.layout.workers,
                                 engine.cache_bytes_per_token * engine.layout.tp, engine.cache_tokens)
        seconds, running = work.rollout_seconds(table, responses, prompt, share, machine.rates)
    estimate = work.step_estimate(
        table, [n + prompt for n in responses], gpus=layout.world_size, imbalance=batches.imbalance,
        epochs=config.algorithm.epochs, recompute=config.model.recompute, reference=config.algorithm.kl_coef > 0,
        rollout=seconds, sync_bytes=sum(b.nbytes for u in sync.units for b in u.buckets), sources=len(sync.sources),
        receivers=engine.engines * engine.layout.workers if engine else 0, rates=machine.rates)
    return asdict(estimate) | {"seconds": estimate.seconds, "running_sequences": running,
                               "rollout_known": engine is not None, "assumes": str(machine.rates)}
