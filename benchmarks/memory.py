"""Peak resident memory of one call, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

# Large blocks go back to the system at once, so that what is resident is what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


def peak_above(call: Callable[[], Any]) -> int:
    """Bytes that the process's resident memory rises while `call` runs (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM") - before
    del result
    return peak


def in_new_process(module: str, *arguments: str, timeout: float = 600) -> str:
    """Last line printed by ``python -m module arguments``, with an allocator that keeps nothing back."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=os.environ | MALLOC, text=True,
                          capture_output=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]
