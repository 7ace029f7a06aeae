"""Checks of a whole configuration before anything starts: every violation at once, each with flag, value and mend.

A configuration that would be silently wrong, or that would fail minutes later, is refused here. The checks look at the
dataclasses, at the presence of the files they name and at the model's config.json; they import no torch and open no
data file. Left out: column names and contents of data files (data/prompts.py), what the hardware can do (platform/),
and whether tp divides the vocabulary, because padding that is the actor's affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from luspo_megatron.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    EvalCommandConfig,
    ExportConfig,
    LaunchConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ParityConfig,
    SftConfig,
    WeightSyncConfig,
)
from luspo_megatron.config_checks_rollout import (
    Violation,
    at_least,
    check_algorithm,
    check_prompts,
    check_reward,
    check_rollout,
    json_object,
    suspicious_clips,
)
from luspo_megatron.config_tools import EnginesConfig
from luspo_megatron.errors import UserError
from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.architecture import Architecture, read_architecture


def resolve_layout(parallel: ParallelConfig, facts: Architecture | None = None) -> ParallelLayout:
    """The layout with ``etp=0`` resolved: 1 for an MoE model when ep > 1, else tp."""
    moe = facts.is_moe if facts else True
    etp = parallel.etp or (1 if moe and parallel.ep > 1 else parallel.tp)
    return ParallelLayout(parallel.world_size, parallel.tp, parallel.pp, parallel.ep, etp, parallel.cp)


def validate(config: Config, facts: Architecture | None = None) -> list[Violation]:
    """Everything that is wrong with a training configuration; empty when it can start.

    ``facts`` are the model's sizes; without them they are read from ``config.model.hf`` when that is there.
    """
    found = [*check_model(config.model)]
    facts, more = _facts(config.model, facts)
    found += more
    found += check_parallel(config.parallel, facts)
    if config.algorithm.kl_coef > 0:
        found += _folder("--model.ref_hf", config.model.ref_hf, "config.json", optional=True)
    found += check_prompts(config.data, "prompts", required=True)
    found += check_prompts(config.data, "eval_prompts", required=False)
    found += check_rollout(config.rollout)
    found += check_reward(config.reward, config.rollout)
    found += check_algorithm(config.algorithm, config.rollout)
    found += check_optimizer(config.optimizer)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    found += check_batch(config.batch, longest, "data.max_prompt_tokens + rollout.max_response_tokens")
    found += check_loss(config.loss)
    found += check_checkpoint(config.checkpoint)
    found += at_least("--run.steps", config.run.steps, 1)
    found += at_least("--run.sample_table_every", config.run.sample_table_every, 0)
    found += check_weight_sync(config.weight_sync)
    found += _eval(config)
    found += check_launch(config.launch)
    return found


def validate_sft(config: SftConfig, facts: Architecture | None = None) -> list[Violation]:
    """The same for ``luspo sft``."""
    found = [*check_model(config.model)]
    facts, more = _facts(config.model, facts)
    found += more
    found += check_parallel(config.parallel, facts)
    if not config.data.path:
        found.append(Violation("--data.path", "", "name a .jsonl or .parquet file of demonstrations"))
    elif not Path(config.data.path).is_file():
        found.append(Violation("--data.path", config.data.path, "there is no such file; check the path"))
    found += json_object("--data.chat_template_args", config.data.chat_template_args, '{"enable_thinking": false}')
    found += at_least("--data.max_tokens", config.data.max_tokens, 2)
    found += at_least("--batch_size", config.batch_size, 1)
    found += at_least("--run.steps", config.run.steps, 1)
    found += check_optimizer(config.optimizer)
    found += check_batch(config.batch, config.data.max_tokens, "data.max_tokens")
    found += check_loss(config.loss)
    found += check_checkpoint(config.checkpoint)
    found += check_launch(config.launch)
    return found


def validate_eval(config: EvalCommandConfig, facts: Architecture | None = None) -> list[Violation]:
    """The same for ``luspo eval``."""
    found: list[Violation] = []
    if config.checkpoint:
        found += _folder("--checkpoint", config.checkpoint)
        facts, more = _facts(config.model, facts)
        found += more
    else:
        found += check_model(config.model)
        facts, more = _facts(config.model, facts)
        found += more
    found += check_parallel(config.parallel, facts)
    found += check_prompts(config.data, "eval_prompts", required=True)
    found += check_rollout(replace(config.rollout, dynamic_sampling=False))
    found += check_reward(config.reward, config.rollout)
    found += check_weight_sync(config.weight_sync)
    found += _eval(config)
    if not config.out:
        found.append(Violation("--out", "", "name a folder for the results"))
    return found


def validate_parity(config: ParityConfig, facts: Architecture | None = None) -> list[Violation]:
    """The same for ``luspo parity``."""
    found = [*check_model(config.model)]
    facts, more = _facts(config.model, facts)
    found += more
    found += check_parallel(config.parallel, facts)
    found += check_prompts(config.data, "prompts", required=False)
    found += check_rollout(replace(config.rollout, dynamic_sampling=False))
    found += check_weight_sync(config.weight_sync)
    for name in ("prompts", "samples"):
        found += at_least(f"--{name}", getattr(config, name), 1)
    found += at_least("--tolerance", config.tolerance, 0)
    if not config.out:
        found.append(Violation("--out", "", "name a folder for the report"))
    return found


def check_weight_sync(settings: WeightSyncConfig) -> Iterator[Violation]:
    yield from at_least("--weight_sync.bucket_bytes", settings.bucket_bytes, 8)
    if settings.folder and settings.transport != "disk":
        yield Violation("--weight_sync.folder", settings.folder, "only the disk transport has one; leave it out, or "
                        "set --weight_sync.transport disk")


def check_launch(settings: LaunchConfig) -> Iterator[Violation]:
    yield from at_least("--launch.gpus_per_node", settings.gpus_per_node, 1)
    yield from at_least("--launch.engine_nodes", settings.engine_nodes, 0)
    if not settings.stop_grace > 0:
        yield Violation("--launch.stop_grace", settings.stop_grace, "take more than 0 seconds")


def validate_engines(config: EnginesConfig) -> list[Violation]:
    """What is wrong with the settings that engines are started from."""
    found = [*check_model(config.model), *check_rollout(replace(config.rollout, dynamic_sampling=False))]
    if config.rollout.urls:
        found.append(Violation("--rollout.urls", config.rollout.urls, "these engines run already; leave it empty"))
    if not config.nodes and config.node:
        found.append(Violation("--node", config.node, "say of how many with --nodes"))
    return found


def validate_export(config: ExportConfig) -> list[Violation]:
    """The same for ``luspo export``."""
    if config.checkpoint:
        found = list(_folder("--checkpoint", config.checkpoint))
    else:
        found = [Violation("--checkpoint", "", "name a run folder or a checkpoint folder")]
    out = Path(config.out)
    if not config.out:
        found.append(Violation("--out", "", "name a folder for the Hugging Face model"))
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        found.append(Violation("--out", config.out, "is there already and not an empty folder; name a new one"))
    return found


def warnings(config: Config, facts: Architecture | None = None) -> list[str]:
    """What is allowed but seldom meant, one line each."""
    out = list(suspicious_clips(config.algorithm))
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if facts is not None and facts.max_positions < longest:
        out.append(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is more than the model's "
            f"max_position_embeddings = {facts.max_positions}"
        )
    return out


def require(violations: list[Violation]) -> None:
    """Raise one UserError that lists all violations; nothing when there are none."""
    if violations:
        head = "1 setting needs mending:" if len(violations) == 1 else f"{len(violations)} settings need mending:"
        raise UserError("\n".join([head, *(f"  {violation}" for violation in violations)]))


def model_facts(model: ModelConfig) -> Architecture | None:
    """The facts of ``model.hf``; None when it holds no readable config.json."""
    try:
        return read_architecture(model.hf, model.family) if model.hf else None
    except UserError:
        return None


def check_model(model: ModelConfig) -> Iterator[Violation]:
    if not model.hf:
        yield Violation("--model.hf", "", "name the folder of the Hugging Face model to start from")
    else:
        yield from _folder("--model.hf", model.hf, "config.json")
    yield from _folder("--model.megatron", model.megatron, optional=True)
    yield from _folder("--model.tokenizer", model.tokenizer, optional=True)
    if not model.router_aux_loss_coef >= 0:
        yield Violation("--model.router_aux_loss_coef", model.router_aux_loss_coef, "take 0 (off) or more")


def check_parallel(parallel: ParallelConfig, facts: Architecture | None) -> Iterator[Violation]:
    """The layout by itself, then against the model."""
    if parallel.etp < 0:
        yield Violation("--parallel.etp", parallel.etp, "take 0 (choose by itself) or more")
        return
    layout = resolve_layout(parallel, facts)
    sizes = layout.violations()
    for text in sizes:
        name = text.partition("=")[0]
        if name == "etp" and parallel.etp == 0:
            continue  # it follows tp, which is named
        mend = text.partition(" must be ")[2]
        mend = f"take {mend}" if mend else f"{text.partition(' is ')[2]} cannot be met: change one of these sizes"
        if name == "world_size" and layout.world_size >= 1:
            mend = f"is {text.partition(' is ')[2]}; take a multiple of it, or smaller parallel sizes"
        yield Violation(f"--parallel.{name}", getattr(layout, name), mend)
    if layout.cp > 1:
        yield Violation("--parallel.cp", layout.cp, "context parallelism is not supported yet; take 1")
    if not parallel.timeout_minutes > 0:
        yield Violation("--parallel.timeout_minutes", parallel.timeout_minutes, "take more than 0")
    if facts is not None and not any(" must be " in text for text in sizes):
        yield from _layout_against_model(layout, parallel, facts)


def _layout_against_model(layout: ParallelLayout, parallel: ParallelConfig, facts: Architecture) -> Iterator[Violation]:
    tp, pp, ep, etp = layout.tp, layout.pp, layout.ep, layout.etp
    if facts.num_layers % pp:
        yield _divides("pp", pp, facts.num_layers, "layers")
    if facts.num_heads % tp:
        yield _divides("tp", tp, facts.num_heads, "attention heads")
    if facts.num_kv_heads % tp and tp % facts.num_kv_heads:
        mend = f"the model has {facts.num_kv_heads} key-value heads; take a divisor or a multiple of that"
        yield Violation("--parallel.tp", tp, mend)
    if facts.hidden % tp:
        yield _divides("tp", tp, facts.hidden, "hidden channels")
    if not facts.is_moe:
        if facts.ffn % tp:
            yield _divides("tp", tp, facts.ffn, "feed-forward channels")
        if ep > 1:
            yield Violation("--parallel.ep", ep, "the model is dense (no experts); take 1")
        if etp != tp:
            yield Violation("--parallel.etp", etp, "the model is dense (no experts); take 0")
        return
    if facts.num_experts % ep:
        yield _divides("ep", ep, facts.num_experts, "experts")
    if facts.moe_ffn % etp:
        yield _divides("etp", etp, facts.moe_ffn, "channels per expert")
    if tp > 1 and not parallel.sequence_parallel:
        yield Violation("--parallel.sequence_parallel", False, "an MoE model with tp > 1 requires it; take true")


def check_optimizer(optimizer: OptimizerConfig) -> Iterator[Violation]:
    for name in ("lr", "eps"):
        value = getattr(optimizer, name)
        if not (value > 0 and math.isfinite(value)):
            yield Violation(f"--optimizer.{name}", value, "take a number above 0")
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield Violation(f"--optimizer.{name}", value, "take at least 0 and less than 1")
    for name in ("warmup_steps", "weight_decay", "clip_grad"):
        yield from at_least(f"--optimizer.{name}", getattr(optimizer, name), 0)


def check_batch(batch: BatchConfig, longest: int, longest_name: str) -> Iterator[Violation]:
    """``longest`` is the longest sequence that can occur, in tokens."""
    if batch.max_tokens_per_micro_batch < longest:
        mend = f"the longest sequence ({longest_name}) is {longest} tokens; take at least that"
        yield Violation("--batch.max_tokens_per_micro_batch", batch.max_tokens_per_micro_batch, mend)


def check_loss(loss: LossConfig) -> Iterator[Violation]:
    yield from at_least("--loss.chunk_bytes", loss.chunk_bytes, 0)
    yield from at_least("--loss.cache_bytes", loss.cache_bytes, -1)


def check_checkpoint(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    yield from at_least("--checkpoint.every", checkpoint.every, 0)
    yield from at_least("--checkpoint.keep", checkpoint.keep, 1)


def _eval(config: Config | EvalCommandConfig) -> Iterator[Violation]:
    yield from at_least("--eval.every", config.eval.every, 0)
    yield from at_least("--eval.samples", config.eval.samples, 1)
    yield from at_least("--eval.interim_size", config.eval.interim_size, 0)
    if not (config.eval.temperature > 0 and math.isfinite(config.eval.temperature)):
        mend = "take a number above 0; eval.greedy adds the greedy sample"
        yield Violation("--eval.temperature", config.eval.temperature, mend)


def _facts(model: ModelConfig, facts: Architecture | None) -> tuple[Architecture | None, list[Violation]]:
    """Given facts, else those of model.hf, else what is wrong with its config.json (its absence is check_model's)."""
    if facts is not None or not model.hf or not (Path(model.hf) / "config.json").is_file():
        return facts, []
    try:
        return read_architecture(model.hf, model.family), []
    except UserError as error:
        return None, [Violation("--model.hf", model.hf, str(error))]


def _folder(flag: str, folder: str, needs: str = "", optional: bool = False) -> Iterator[Violation]:
    if optional and not folder:
        return
    if not Path(folder).is_dir():
        yield Violation(flag, folder, "there is no such folder; check the path")
    elif needs and not (Path(folder) / needs).is_file():
        yield Violation(flag, folder, f"the folder holds no {needs}; name a Hugging Face model folder")


def _divides(name: str, size: int, count: int, of: str) -> Violation:
    choices = [n for n in range(1, min(count, 64) + 1) if count % n == 0]
    mend = f"does not divide the model's {count} {of}; take one of {', '.join(map(str, choices))}"
    return Violation(f"--parallel.{name}", size, mend)
