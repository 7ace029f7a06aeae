"""Settings of `luspo study` and `luspo report`, and their checks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from luspo_megatron.config import AlgorithmConfig, Config, Objective
from luspo_megatron.config_yaml import suggestion
from luspo_megatron.errors import UserError

TOKEN_LEVEL = ("grpo", "drgrpo", "dapo", "cispo")
"""Objectives whose ratio is a token's: they take the wide token clip."""


@dataclass(frozen=True)
class LengthBiasConfig:
    """Everything `luspo study length-bias` can be told."""

    algorithms: str = "luspo,gspo,grpo,drgrpo,dapo"
    """Objectives to compare, with commas between them."""
    seeds: int = 5
    """Seeds 0 to N - 1; every objective runs with each of them, on the same prompts and from the same start."""
    task: Literal["neutral", "need"] = "neutral"
    """neutral: the reward does not depend on the length; need: longer responses are right more often."""
    out: str = "runs/study-length-bias"
    """Folder for runs.jsonl, report.html and the figures."""
    steps: int = 200
    """Rollouts per run."""
    prompts: int = 64
    """Prompts per rollout."""
    group_size: int = 8
    """Responses per prompt."""
    prompts_per_mini_batch: int = 8
    """Prompts per optimizer step."""
    lr: float = 0.01
    """Learning rate of Adam."""
    start_length: float = 16.0
    """Mean response length at the start, in tokens."""
    max_response_tokens: int = 64
    """Longest response."""
    clip_low: float = 2e-3
    """Lower clip distance of the sequence-level objectives (the paper's)."""
    clip_high: float = 2.5e-3
    """Upper clip distance of the sequence-level objectives (the paper's)."""
    token_clip_low: float = 0.2
    """Lower clip distance of the token-level objectives."""
    token_clip_high: float = 0.28
    """Upper clip distance of the token-level objectives."""
    wide_clip: bool = True
    """Also run LUSPO and GSPO, where asked for, with a very wide and lopsided clip, under which LUSPO shrinks too."""
    wide_clip_low: float = 1e-2
    """Lower distance of that wide clip."""
    wide_clip_high: float = 4e-2
    """Upper distance of that wide clip."""
    workers: int = 0
    """Processes at a time; 0: one per usable CPU."""


@dataclass(frozen=True)
class ModelStudyConfig(Config):
    """Everything `luspo study model` can be told: the settings of `luspo train`, and these."""

    algorithms: str = "luspo,gspo,grpo"
    """Objectives to compare, with commas between them; each takes the place of algorithm.objective."""
    seeds: int = 3
    """Seeds run.seed, run.seed + 1, ...; every objective runs with each of them, from the same weights and prompts."""
    out: str = "runs/study-model"
    """Folder for the runs and report.html; runs that are complete there are not made again."""
    token_clip_low: float = 0.2
    """Lower clip distance of the token-level objectives, in the place of algorithm.clip_low."""
    token_clip_high: float = 0.28
    """Upper clip distance of the token-level objectives, in the place of algorithm.clip_high."""
    report_only: bool = False
    """Make no runs; write the report of what lies in the folder."""


@dataclass(frozen=True)
class EnginesConfig(Config):
    """Everything `luspo engines` can be told: the settings of the run that the engines are for, and these."""

    registry: str = ""
    """Folder in which the run finds the engines; it must be seen by all nodes. Empty: <run.dir>/engines."""
    node: int = 0
    """Which of the engine nodes this is, from 0. Looked at when nodes is given."""
    nodes: int = 0
    """Engine nodes that share the run's engines; 0: those of this Slurm step, else this one only."""
    host: str = ""
    """Address of this machine that the engines listen on; empty: this node's under Slurm, else loopback."""


@dataclass(frozen=True)
class ReportConfig:
    """Everything `luspo report` can be told. Run folders may be given without a flag: luspo report RUN [RUN ...]."""

    runs: tuple[str, ...] = ()
    """Run folders; several are compared side by side."""
    out: str = ""
    """File to write; empty: report.html in the run folder, or comparison.html beside the first of several runs."""
    serve: bool = False
    """Show the report on this machine's loopback address and keep it up to date while the runs go on."""
    port: int = 8008
    """Port of --serve; 0: any free one."""
    refresh: float = 3.0
    """Seconds between two looks at the files with --serve."""


def algorithms_of(text: str) -> list[str]:
    """"luspo,gspo" -> ["luspo", "gspo"]; raises UserError for unknown and for repeated names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = get_args(Objective)
    problems = [f"--algorithms: unknown objective {name!r}{suggestion(name, known)} (there are {', '.join(known)})"
                for name in names if name not in known]
    if len(set(names)) < len(names):
        problems.append(f"--algorithms {text}: an objective is given twice; name each once")
    if not names:
        problems.append("--algorithms is empty; name one or more, e.g. luspo,gspo")
    if problems:
        raise UserError("\n".join(problems))
    return names


def check_length_bias(config: LengthBiasConfig) -> None:
    """Raises UserError that lists everything wrong."""
    algorithms_of(config.algorithms)
    _raise([
        *_at_least(config, 1, "seeds", "prompts", "prompts_per_mini_batch"), *_at_least(config, 10, "steps"),
        *_at_least(config, 2, "group_size"), *_at_least(config, 0, "workers"),
        *_at_least(config, 4, "max_response_tokens"),
        *_within(config, 0, "lr"), *_clips(config, "clip_low", "token_clip_low", "wide_clip_low"),
        *_within(config, 0, "clip_high", "token_clip_high", "wide_clip_high"), *_lengths(config),
        *([] if config.out else ["--out is empty; name a folder"]),
    ])


def check_model_study(config: ModelStudyConfig) -> None:
    """The study's own settings; those of training are checked run by run (config_checks.validate)."""
    algorithms_of(config.algorithms)
    _raise([*_at_least(config, 1, "seeds"), *_clips(config, "token_clip_low"), *_within(config, 0, "token_clip_high"),
            *([] if config.out else ["--out is empty; name a folder"])])


def check_report(config: ReportConfig) -> None:
    """The settings alone; whether the folders hold runs is seen when they are read."""
    _raise([*([] if config.runs else ["luspo report needs one or more run folders, e.g. luspo report runs/luspo"]),
            *_within(config, 0, "refresh"),
            *([] if 0 <= config.port < 65536 else [f"--port {config.port}: give a number from 0 to 65535"]),
            *(["--out and --serve exclude each other; leave one away"] if config.serve and config.out else [])])


def variant(algorithm: AlgorithmConfig, name: str, token_clip: tuple[float, float]) -> AlgorithmConfig:
    """The settings with another objective, and with the token clip where that is a token-level one."""
    if name not in TOKEN_LEVEL:
        return replace(algorithm, objective=name)
    return replace(algorithm, objective=name, clip_low=token_clip[0], clip_high=token_clip[1])


def _raise(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


def _at_least(config: Any, low: int, *names: str) -> Iterator[str]:
    for name in names:
        if getattr(config, name) < low:
            yield f"--{name} {getattr(config, name)}: give {low} or more"


def _within(config: Any, above: float, *names: str) -> Iterator[str]:
    for name in names:
        if not above < getattr(config, name) < float("inf"):
            yield f"--{name} {getattr(config, name)}: give a number above {above}"


def _clips(config: Any, *names: str) -> Iterator[str]:
    for name in names:
        if not 0 < getattr(config, name) < 1:
            yield f"--{name} {getattr(config, name)}: give a number between 0 and 1"


def _lengths(config: LengthBiasConfig) -> Iterator[str]:
    if not 2.5 <= config.start_length <= config.max_response_tokens:
        yield (f"--start_length {config.start_length}: give 2.5 or more (two tokens are STOP and the answer), and no "
               f"more than --max_response_tokens {config.max_response_tokens}")
    if config.prompts % max(config.prompts_per_mini_batch, 1):
        yield (f"--prompts {config.prompts} is no multiple of --prompts_per_mini_batch "
               f"{config.prompts_per_mini_batch}; change one of them")
