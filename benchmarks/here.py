"""Where a benchmark ran: figures mean little without it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else model}, {os.cpu_count()} CPUs, torch {torch.__version__}"


def commit() -> str:
    """Of this checkout; + where files differ from it; empty outside git."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
