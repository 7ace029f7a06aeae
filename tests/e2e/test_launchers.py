"""Ranks that somebody else has started: torchrun, and processes with variables of their own (an ssh loop, mpirun)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from luspo_megatron.launch.local import free_port
from tests.e2e.project import ROOT, Project, rows, untimed

FLAGS = ("--run.steps", "1", "--parallel.world_size", "2", "--parallel.ep", "2", "--checkpoint.export_at_end", "false")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
LUSPO = [sys.executable, "-m", "luspo_megatron"]


def variables(kind: str, rank: int, port: int) -> dict[str, str]:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if kind == "mpirun":
        return master | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
                         "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    return master | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}


def test_every_launcher_gives_the_same_run(project: Project, tmp_path: Path) -> None:
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found = {}
    for kind in ("torchrun", "ssh", "mpirun"):
        run_dir, port = tmp_path / kind, free_port()
        command = [*LUSPO, *project.train(run_dir, *FLAGS)]
        starts = [[*TORCHRUN, "--master-port", str(port), *command]] if kind == "torchrun" else [command, command]
        processes = []
        for rank, words in enumerate(starts):
            with (tmp_path / f"{kind}-{rank}.out").open("wb") as out:
                env = base if kind == "torchrun" else base | variables(kind, rank, port)
                processes.append(subprocess.Popen(words, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT))
        try:
            codes = [process.wait(300) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert set(codes) == {0}, (tmp_path / f"{kind}-0.out").read_text()
        found[kind] = untimed(rows(run_dir))
    assert len(found["ssh"]) == 1 and found["ssh"] == found["mpirun"] == found["torchrun"]


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_of_mpirun_that_knows_no_master_says_so(project: Project, tmp_path: Path, missing: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables("mpirun", 0, 1)}
    del env[missing]
    done = subprocess.run([*LUSPO, *project.train(tmp_path / "run", *FLAGS)], env=env, capture_output=True, text=True,
                          timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 2 and f"{missing} is not set" in done.stderr and "Traceback" not in done.stderr
