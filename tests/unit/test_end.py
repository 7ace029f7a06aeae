"""A process ends with its exit functions run, its output whole and its code, with a torch.distributed world or not."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORLD = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
LEAVE = """
import atexit
from luspo_megatron.launch.end import end
atexit.register(print, "exit function")
print("said")
try:
    end(5)
finally:
    print("stack unwound")
"""


@pytest.mark.parametrize(("program", "lines"), [
    (LEAVE, ["said", "stack unwound", "exit function"]),
    (WORLD + LEAVE, ["said", "exit function"]),  # nothing after it: the interpreter is not taken down
])
def test_end(program: str, lines: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 5 and done.stdout.splitlines() == lines, done.stderr
