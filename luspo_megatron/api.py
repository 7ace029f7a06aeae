"""The Python interface: a run as one call, for notebooks and for programs around training.

A run is processes of its own, as on the command line: nothing of it is left in the caller's process, and the caller
needs no torch. Rewards, families and objectives of one's own are named `module:attribute` in the configuration and must
be importable there (PYTHONPATH or the working directory).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luspo_megatron import config_checks
from luspo_megatron.config import Config
from luspo_megatron.config_io import load_config, save_config
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.report.metrics import METRICS_FILE
from luspo_megatron.report.records import read_lines
from luspo_megatron.report.summary import read_summary

LAST_LINES = 30


@dataclass(frozen=True)
class RunResult:
    """What a run left. `metrics`: one row per step (report/metrics.py has their units); `summary`: summary.json."""

    dir: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.dir / "report.html"

    @property
    def export(self) -> Path | None:
        """The trained policy as a Hugging Face folder; None where none was written."""
        found = self.summary.get("export")
        return Path(found) if found else None


def load(*files: str | Path, **settings: Any) -> Config:
    """A configuration from YAML files, later ones first, then settings: `load("a.yaml", optimizer={"lr": 1e-6})`.

    Raises UserError that names every unknown file, key and value.
    """
    flags = [word for path in files for word in ("--config", str(path))]
    for section, values in settings.items():
        if not isinstance(values, dict):
            raise UserError(f"{section}={values!r}: settings are given by section, e.g. optimizer={{'lr': 1e-6}}")
        for name, value in values.items():
            words = value if isinstance(value, list | tuple) else [value]
            flags += [f"--{section}.{name}", *map(str, words)]
    return load_config(Config, flags, prog="load")


def train(config: Config, *, quiet: bool = False) -> RunResult:
    """Runs `luspo train` with this configuration to its end; prints what it prints unless `quiet`.

    Raises UserError for a mistake in the configuration and RunError where the run could not go on, with its last lines;
    the run folder keeps everything, and the same call goes on from the newest checkpoint.
    """
    config_checks.require(config_checks.validate(config))
    with tempfile.TemporaryDirectory(prefix="luspo-") as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        command = [sys.executable, "-m", "luspo_megatron", "train", "--config", str(path)]
        last: deque[str] = deque(maxlen=LAST_LINES)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                              text=True, errors="replace") as process:
            try:
                for line in process.stdout or ():
                    last.append(line)
                    if not quiet:
                        print(line, end="", flush=True)
            except BaseException:
                process.terminate()
                raise
    if process.returncode:
        text = "".join(last).strip().removeprefix("luspo: ")
        kind = UserError if process.returncode == UserError.exit_code else RunError
        raise kind(text or f"luspo train ended with {process.returncode}")
    run_dir = Path(config.run.dir)
    return RunResult(run_dir, read_lines(run_dir / METRICS_FILE)[0], read_summary(run_dir))
