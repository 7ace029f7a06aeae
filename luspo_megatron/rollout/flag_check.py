"""The engines' command lines through the engines' own argument parsers: what a dry run can say of them. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from luspo_megatron.config import Config, EvalCommandConfig
from luspo_megatron.errors import UserError
from luspo_megatron.rollout.engine import load_engine_kind
from luspo_megatron.rollout.inside_engine.check_flags import NOT_INSTALLED
from luspo_megatron.rollout.starter import Starter, on_cpu

SECONDS = 180.0  # an engine's imports alone can take half a minute
PARSED = ("vllm", "sglang")


def check_engine_flags(config: Config | EvalCommandConfig) -> str:
    """What came of it, as a line. Raises UserError with the parser's message when the engine does not take its flags.

    Nothing is checked, and that is said, where the engine is not installed on this machine.
    """
    rollout = config.rollout
    if rollout.engine not in PARSED or rollout.urls:
        return f"engine {rollout.engine}: its flags are not checked"
    command = Starter(rollout, load_engine_kind(rollout.engine), config.model.hf, config.model.dtype, Path(), "",
                      max_length=config.data.max_prompt_tokens + config.rollout.max_response_tokens).command("-")
    flags = command[command.index("--") + 1 :]
    script = Path(__file__).parent / "inside_engine/check_flags.py"
    env = os.environ | ({"LUSPO_PLATFORM": "cpu", "SGLANG_USE_CPU_ENGINE": "1", "LUSPO_SGLANG_CPU": "1"} if on_cpu()
                        else {})
    env.pop("PYTHONPATH", None)  # of this program's environment, not of the engine's
    python = rollout.engine_python or sys.executable
    try:
        done = subprocess.run([python, str(script), rollout.engine, "--", *flags], env=env, capture_output=True,
                              text=True, timeout=SECONDS, check=False)
    except OSError as error:
        raise UserError(f"--rollout.engine_python {python}: {error.strerror}; name the Python of the environment that "
                        f"{rollout.engine} is installed in") from None
    except subprocess.TimeoutExpired:
        return f"engine {rollout.engine}: its parser did not answer within {SECONDS:.0f} s; its flags are not checked"
    if done.returncode == NOT_INSTALLED:
        return f"engine {rollout.engine}: not installed for {python}; its flags are not checked"
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode:
        raise UserError(f"--rollout.engine_args {' '.join(rollout.engine_args)}: {rollout.engine} does not take its "
                        f"flags: {said}")
    return f"engine {rollout.engine}: its own parser takes its flags, {' '.join(flags)}"
