"""The conversion scripts around `luspo` commands: a run becomes a Hugging Face folder, and training starts from OUT."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.e2e.project import LAYOUTS, ROOT, Project, luspo, rows, tensors

TOOLS = ROOT / "tools/checkpoint_convert"


def tool(script: str, *arguments: object) -> str:
    """A script run as a person runs it, from any folder and without PYTHONPATH."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOLS / script), *map(str, arguments), "--workers", "2"]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_a_run_and_into_a_run(project: Project, tmp_path: Path) -> None:
    """`luspo sft` at TP2 EP2 -> megatron_to_hf equals the run's own export -> hf_to_megatron -> training from it has
    the losses of training from the Hugging Face folder, bit for bit, while model.hf holds other weights."""
    first = tmp_path / "first"
    luspo(project.sft(first, *LAYOUTS["tp2ep2"], "--run.steps", "3"), tmp_path / "a")
    tool("megatron_to_hf.py", "--megatron", first, "--out", tmp_path / "hf", "--shard-size", "100KB")
    want, got = tensors(first / "export"), tensors(tmp_path / "hf")
    assert want.keys() == got.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    tool("hf_to_megatron.py", "--hf", tmp_path / "hf", "--out", tmp_path / "m", "--tp", "2", "--ep", "2")
    said = tool("verify.py", tmp_path / "m", first, "--logits")
    assert "tensors equal" in said and "the same greedy choices" in said
    losses = []
    for name, flags in (("from-hf", ["--model.hf", str(tmp_path / "hf")]),
                        ("from-megatron", ["--model.megatron", str(tmp_path / "m")])):
        luspo(project.sft(tmp_path / name, *LAYOUTS["pp2"], "--run.steps", "2", *flags), tmp_path / f"{name}-output")
        losses.append([row["loss"] for row in rows(tmp_path / name)])
    assert losses[0] == losses[1] and losses[0][0] < rows(first)[0]["loss"] - 0.1
    exported = luspo(["export", "--checkpoint", str(tmp_path / "m"), "--out", str(tmp_path / "again")], tmp_path / "b")
    assert "exported" in exported.stdout
    for name, value in want.items():
        np.testing.assert_array_equal(tensors(tmp_path / "again")[name], value, err_msg=name)
