"""One cluster for all Slurm tests: 16 nodes of 8 fake GPUs on loopback (cluster.sh). Skipped where Slurm is absent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.project import Project

ROOT = Path(__file__).parents[2]
PROGRAMS = ("sbatch", "munged", "slurmctld", "slurmd")


@dataclass
class Cluster:
    folder: Path
    environment: dict[str, str]

    def slurm(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, out: Path, *words: str, options: tuple[str, ...] = (), cwd: Path | None = None,
               **environment: str) -> Job:
        """sbatch with arguments ``words`` from folder ``cwd``; output to the file ``out``."""
        command = ["sbatch", "--parsable", f"--output={out}", *options, str(script), *words]
        done = subprocess.run(command, env=self.environment | environment, capture_output=True, text=True, cwd=cwd,
                              timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), out)


@dataclass
class Job:
    cluster: Cluster
    number: str
    out: Path

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def field(self, name: str) -> str:
        words = self.cluster.slurm("scontrol", "--oneliner", "show", "job", self.number).split()
        return next(word.split("=", 1)[1] for word in words if word.startswith(name + "="))

    def wait(self, timeout: float = 400) -> str:
        """Until the job is at an end (not requeued); its state."""
        return self.until(lambda: (state := self.field("JobState")) not in (
            "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED") and state, timeout)

    def until[T](self, condition: Callable[[], T], timeout: float = 400) -> T:
        end = time.monotonic() + timeout
        while not (found := condition()):
            if time.monotonic() > end:
                self.cluster.slurm("scancel", "--signal=KILL", "--full", self.number, check=False)
                self.cluster.slurm("scancel", self.number, check=False)
                raise AssertionError(f"not within {timeout} s; job {self.field('JobState')} said:\n{self.said}")
            time.sleep(0.2)
        return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no Slurm here: {', '.join(missing) or 'its daemons need root'} (apt-get install slurmctld slurmd "
                    "slurm-client munge)")
    folder = tmp_path_factory.mktemp("slurm")
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    command = bin_folder / "luspo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m luspo_megatron "$@"\n')
    command.chmod(0o755)
    base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        base.pop(name, None)
    environment = {**base, "SLURM_CONF": str(folder / "cluster" / "slurm.conf"), "PYTHONPATH": str(ROOT),
                   "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{base['PATH']}", "OMP_NUM_THREADS": "1",
                   "LUSPO_PLATFORM": "cpu"}
    script = Path(__file__).with_name("cluster.sh")
    try:
        subprocess.run([script, "start", folder / "cluster", "16", "8"], env=environment, check=True, timeout=120)
        yield Cluster(folder, environment)
    finally:
        subprocess.run([script, "stop", folder / "cluster"], env=environment, check=False, timeout=60)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))
