"""What a run was made with: versions of the programs, the host, the project's commit.

Versions come from the installed packages' metadata, so that nothing heavy is imported.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from luspo_megatron.report.records import read_json, write_json

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("luspo-megatron", "torch", "megatron-core", "transformers", "transformer-engine", "vllm", "sglang",
            "numpy", "reasoning-gym", "math-verify")


def collect_environment() -> dict[str, Any]:
    """Versions (None: not installed), processor count and commit of the machine this runs on."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": _usable_cpus(),
        "commit": project_commit(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def write_environment(run_dir: str | Path) -> dict[str, Any]:
    """Collect and write <run_dir>/environment.json; returns what was written."""
    environment = collect_environment()
    write_json(Path(run_dir) / ENVIRONMENT_FILE, environment)
    return environment


def read_environment(run_dir: str | Path) -> dict[str, Any]:
    """The run's recorded environment, {} where none was recorded."""
    return read_json(Path(run_dir) / ENVIRONMENT_FILE)


def project_commit(folder: Path | None = None) -> str | None:
    """The git commit of the project, "+changes" behind it when tracked files differ; None outside a checkout.

    An installed package may lie inside somebody else's repository (a virtual environment in a project folder), so the
    commit counts only where git tracks this package's own file.
    """
    folder = folder or Path(__file__).resolve().parent
    if _git(folder, "ls-files", "--error-unmatch", "environment.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changes else "")


def _usable_cpus() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, None where it fails or git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10,
                              check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
