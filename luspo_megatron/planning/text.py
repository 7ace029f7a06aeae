"""The plan as text: what a person reads before submitting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GIB = 2**30


def render(plan: dict[str, Any]) -> str:
    """All sections of the plan (plan.py: make_plan)."""
    return "\n".join(_lines(plan))


def _lines(plan: dict[str, Any]) -> Iterator[str]:
    yield from (f"violation: {text}" for text in plan["violations"])
    yield from (f"note: {text}" for text in plan["notes"])
    if "model" not in plan:
        yield "No plan: mend the violations first."
        return
    yield from _model(plan)
    yield from _grid(plan)
    yield from _batch(plan["batch"])
    yield from _memory(plan)
    yield from _sync(plan["sync"])
    yield from _step(plan["step"])
    yield ""
    yield ("It does not start: " + plan["violations"][0]) if plan["violations"] else (
        "It fits." if plan["fits"] else "It does not fit: see the moments marked NO.")


def _model(plan: dict[str, Any]) -> Iterator[str]:
    model, layout = plan["model"], plan["layout"]
    yield (f"model     {model['architecture']}, {model['parameters'] / 1e9:.3f} B parameters in {model['tensors']:,} "
           f"tensors, {model['active_parameters'] / 1e9:.2f} B used by a token")
    sizes = " ".join(f"{name.upper()}{layout[name]}" for name in ("tp", "pp", "cp", "dp", "ep", "etp"))
    engines = f" + {layout['engine_nodes']} engine nodes" if layout["engine_nodes"] else ""
    yield (f"layout    {layout['world_size']} ranks on {layout['nodes']} nodes x {layout['gpus_per_node']} GPUs"
           f"{engines}: {sizes} (experts: DP{layout['edp']})")


def _span(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"


def _grid(plan: dict[str, Any]) -> Iterator[str]:
    yield "\nrank grid (node: ranks, coordinates)"
    for node, row in enumerate(plan["grid"]):
        places = "  ".join(f"{name} {_span(row[name])}" for name in ("pp", "dp", "tp", "ep"))
        yield f"  {node:>3}: ranks {_span(row['ranks']):<9}{places}"


def _batch(batch: dict[str, Any]) -> Iterator[str]:
    lengths = ", ".join(f"{share:.0%} {int(tokens)}" for share, tokens in batch["percentiles"])
    micro = _span((batch["micro_batches_min"], batch["micro_batches_max"]))
    yield f"\nbatch plan, response tokens at {lengths}; prompts of {batch['prompt_tokens']}"
    yield (f"  {batch['prompts']} prompts, {batch['samples']} samples, {batch['tokens'] / 1e6:.2f} M tokens (mean "
           f"response {batch['mean_length']:.0f})")
    yield (f"  {batch['mini_batches']} mini-batches (optimizer steps) of {micro} micro-batches per data-parallel rank; "
           f"budget filled to {batch['fill']:.0%}, fullest rank {batch['imbalance']:.2f} x the mean")


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    names = ("parameters", "gradients", "optimizer", "reference", "activations", "loss_stage")
    yield f"\nmemory of one GPU, GiB ({plan['gpu_memory'] / GIB:.0f} there, {plan['margin'] / GIB:.0f} kept free)"
    yield "  stage layers " + " ".join(f"{name:>12}" for name in (*names, "training"))
    for stage in plan["stages"]:
        cells = " ".join(f"{stage[name] / GIB:>12.2f}" for name in (*names, "training"))
        yield f"  {stage['stage']:>5} {stage['layers']:>6} {cells}"
    if engine := plan["engine"]:
        where = "on nodes of their own" if not engine["colocated"] else (
            "taking turns with the trainers on their GPUs" if engine["takes_turns"] else
            "on the trainers' GPUs, both in memory all the time (rollout.hand_over off)")
        yield (f"  engines: {engine['engines']} x {engine['kind']} of {engine['layout']['workers']} GPUs, {where}; "
               f"weights {engine['weights'] / GIB:.2f}, cache {engine['cache'] / GIB:.2f} = "
               f"{engine['cache_tokens'] / 1e3:.0f} k tokens per engine")
    for place in plan["places"]:
        shared = f" = ranks {_span(place['ranks'])}" if place["ranks"] else ""
        yield f"    engine {place['engine']}: node {place['node']}, GPUs {_span(place['gpus'])}{shared}"
    for moment in plan["moments"]:
        yield (f"  {moment['moment']:<9} {moment['bytes'] / GIB:>7.2f} of {moment['limit'] / GIB:.2f} "
               f"{'ok' if moment['fits'] else 'NO'}")
    yield f"  host memory of a node {plan['host_per_node'] / GIB:.0f} of {plan['host_memory'] / GIB:.0f}"


def _sync(sync: dict[str, Any]) -> Iterator[str]:
    low, high = sync["bytes_of_source"]
    yield (f"\nweight sync: {sync['bytes'] / 1e9:.2f} GB in {sync['buckets']} buckets of at most "
           f"{sync['largest'] / 2**20:.0f} MiB from {sync['sources']} ranks ({low / 1e9:.2f} to {high / 1e9:.2f} GB "
           f"each) to {sync['receivers'] or 'the'} engine workers")


def _step(step: dict[str, Any]) -> Iterator[str]:
    yield (f"\nestimate of a step: {step['train_flops'] / 1e15:.1f} PFLOP train, "
           f"{step['logprob_flops'] / 1e15:.1f} PFLOP log-probs")
    rollout = f"{step['rollout_seconds']:.0f} s rollout" if step["rollout_known"] else "rollout not estimated"
    running = f" ({step['running_sequences']} sequences at a time per engine)" if step["rollout_known"] else ""
    yield (f"  {rollout}{running}, {step['logprob_seconds']:.0f} s log-probs, {step['train_seconds']:.0f} s train, "
           f"{step['sync_seconds']:.1f} s sync: {step['seconds']:.0f} s")
    yield f"  assumes {step['assumes']}"
