"""The ``luspo`` command: one function per subcommand.

Each function reads its configuration, checks all of it, and only then imports the module that does the work, so that
help and mistakes are answered at once and without torch. A mistake of the user ends with one message and exit code 2,
a run that could not go on with 1, Ctrl-C with 130; none of these shows a traceback. Faults of the program do.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from luspo_megatron import __version__, config_checks, config_help, config_tools
from luspo_megatron.config import Config, EvalCommandConfig, ExportConfig, ParityConfig, SftConfig
from luspo_megatron.config_io import field_types, load_config, split_words
from luspo_megatron.config_tools import EnginesConfig, LengthBiasConfig, ModelStudyConfig, ReportConfig
from luspo_megatron.config_yaml import suggestion
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.launch.end import end

EXIT_INTERRUPTED = 128 + signal.SIGINT


def train(argv: Sequence[str]) -> int:
    """Train a policy with reinforcement learning from verifiable rewards (LUSPO and its kin)."""
    config = load_config(Config, argv, prog="luspo train", description=_summary(train))
    config_checks.require(config_checks.validate(config))
    for line in config_checks.warnings(config, config_checks.model_facts(config.model)):
        _warn(line)
    return _call("luspo_megatron.trainer", config)


def sft(argv: Sequence[str]) -> int:
    """Train a policy on demonstrations (supervised cold start) with the same actor."""
    config = load_config(SftConfig, argv, prog="luspo sft", description=_summary(sft))
    config_checks.require(config_checks.validate_sft(config))
    return _call("luspo_megatron.sft", config)


def evaluate(argv: Sequence[str]) -> int:
    """Measure the pass rate of a checkpoint or of a Hugging Face model on held-out prompts."""
    config = load_config(EvalCommandConfig, argv, prog="luspo eval", description=_summary(evaluate))
    config_checks.require(config_checks.validate_eval(config))
    return _call("luspo_megatron.evaluate", config)


def export(argv: Sequence[str]) -> int:
    """Write a checkpoint as a Hugging Face model (safetensors)."""
    config = load_config(ExportConfig, argv, prog="luspo export", description=_summary(export))
    config_checks.require(config_checks.validate_export(config))
    return _call("luspo_megatron.export", config)


def engines(argv: Sequence[str]) -> int:
    """Start this node's rollout engines, keep them alive, and make them known to a run."""
    config = load_config(EnginesConfig, argv, prog="luspo engines", description=_summary(engines))
    config_checks.require(config_checks.validate_engines(config))
    return _call("luspo_megatron.rollout.supervisor", config)


def plan(argv: Sequence[str]) -> int:
    """Check a configuration and show what it takes (ranks, batches, memory, sync, time), without a GPU."""
    module = importlib.import_module("luspo_megatron.planning.plan")
    return int(module.main(argv))


def doctor(argv: Sequence[str]) -> int:
    """Look at this machine and, with flags of luspo train, at a configuration's model, data and reward."""
    words = ["--config", *argv] if argv and not argv[0].startswith("-") else list(argv)
    config = load_config(Config, words, prog="luspo doctor", description=_summary(doctor)) if words else None
    module = importlib.import_module("luspo_megatron.doctor.main")
    return int(module.main(config))


def study(argv: Sequence[str]) -> int:
    """Compare objectives by what they do to the response length (length-bias | model)."""
    if not argv or argv[0] in ("-h", "--help"):
        print(study_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else UserError.exit_code
    if argv[0] not in STUDIES:
        raise UserError(f"unknown study {argv[0]!r}{suggestion(argv[0], STUDIES)} (luspo study --help lists them)")
    return STUDIES[argv[0]](argv[1:])


def length_bias(argv: Sequence[str]) -> int:
    """Compare objectives on a policy of a few hundred numbers (minutes on two CPU cores)."""
    config = load_config(LengthBiasConfig, argv, prog="luspo study length-bias", description=_summary(length_bias))
    config_tools.check_length_bias(config)
    return _call("luspo_megatron.study.length_bias", config)


def model_study(argv: Sequence[str]) -> int:
    """Compare objectives with `luspo train` on the same weights and prompts."""
    config = load_config(ModelStudyConfig, argv, prog="luspo study model", description=_summary(model_study))
    config_tools.check_model_study(config)
    config_checks.require(config_checks.validate(config))
    return _call("luspo_megatron.study.model", config)


STUDIES: dict[str, Callable[[Sequence[str]], int]] = {"length-bias": length_bias, "model": model_study}


def report(argv: Sequence[str]) -> int:
    """Write a run's report, compare several runs side by side, or show either live (RUN [RUN ...])."""
    runs, flags = split_words(argv, field_types(ReportConfig))
    flags = [*flags, "--runs", *runs] if runs else flags
    config = load_config(ReportConfig, flags, prog="luspo report", description=_summary(report))
    config_tools.check_report(config)
    return _call("luspo_megatron.report.command", config)


def parity(argv: Sequence[str]) -> int:
    """Compare Hugging Face, actor and engines: weights by checksums, log-probs on the same tokens."""
    config = load_config(ParityConfig, argv, prog="luspo parity", description=_summary(parity))
    config_checks.require(config_checks.validate_parity(config))
    return _call("luspo_megatron.parity", config)


def show_config(argv: Sequence[str]) -> int:
    """Print the resolved settings and where each comes from; --diff A B; --schema for editors."""
    if argv and argv[0] in ("-h", "--help"):
        print(CONFIG_USAGE)
        return 0
    return config_help.main(argv, CONFIGS)


CONFIGS = {"train": Config, "sft": SftConfig, "eval": EvalCommandConfig, "export": ExportConfig,
           "parity": ParityConfig}
CONFIG_USAGE = f"""usage: luspo config [{"|".join(CONFIGS)}] [FLAGS]

luspo config [COMMAND] [--config FILE] [FLAGS]   the settings that the command would run with, and where each comes from
luspo config [COMMAND] --diff A B                what differs between two YAML files or run folders
luspo config [COMMAND] --schema                  JSON Schema of the command's YAML files, for editors"""

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "sft": sft,
    "eval": evaluate,
    "export": export,
    "engines": engines,
    "plan": plan,
    "doctor": doctor,
    "study": study,
    "report": report,
    "parity": parity,
    "config": show_config,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``luspo``. Returns the exit code: 0 done, 1 the run could not go on, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except (UserError, RunError) as error:
        print(f"luspo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("luspo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def command() -> NoReturn:
    """The ``luspo`` command as a process of its own."""
    end(main())


def _dispatch(words: list[str]) -> int:
    if not words:
        print(usage(), file=sys.stderr)
        return UserError.exit_code
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"luspo {__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{suggestion(name, COMMANDS)} (luspo --help lists the commands)")
    try:
        return COMMANDS[name](rest)
    except SystemExit as stop:  # the help has been shown
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def usage() -> str:
    """The text of ``luspo --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {_summary(command)}" for name, command in COMMANDS.items()]
    head = "usage: luspo COMMAND [FLAGS]\n\nRLVR training of large MoE models with LUSPO on Megatron-core.\n\ncommands:"
    foot = "\nluspo COMMAND --help lists the flags of a command; luspo --version shows the version."
    return "\n".join([head, *lines, foot])


def study_usage() -> str:
    """The text of ``luspo study --help``."""
    width = max(map(len, STUDIES))
    lines = [f"  {name:<{width}}  {_summary(command)}" for name, command in STUDIES.items()]
    return "\n".join(["usage: luspo study STUDY [FLAGS]\n\nstudies:", *lines,
                      "\nluspo study STUDY --help lists the flags of a study."])


def _summary(command: Callable[..., int]) -> str:
    return (command.__doc__ or "").strip()


def _call(module: str, config: object) -> int:
    """Import ``module`` only now and run its ``main(config)``; what is no integer counts as success."""
    code = importlib.import_module(module).main(config)
    return code if isinstance(code, int) else 0


def _warn(line: str) -> None:
    """One warning, on the first rank only when a launcher has started several."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"luspo: warning: {line}", file=sys.stderr)
