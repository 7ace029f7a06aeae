"""The CPU platform leaves the rest of torch alone; in a process of its own, where it comes before everything else."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch
from luspo_megatron.platform import platform
platform()
assert torch.empty(2, device="cuda").device.type == "cpu"
with torch.device("meta"):
    made = torch.empty(2), torch.zeros(2), torch.nn.Linear(2, 3).weight
print(*[tensor.device for tensor in made])
"""


def test_a_device_context_still_acts() -> None:
    """transformers builds models on the meta device and fills what no file holds (rope frequencies) afterwards."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["meta"] * 3
