"""One project and one uninterrupted run, shared by all end-to-end tests of a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.project import LAYOUTS, Command, Project, luspo


@dataclass(frozen=True)
class Run:
    dir: Path
    command: Command


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def straight(project: Project) -> Run:
    """Six steps of TP2 x EP2 without a break, saved after 3 and 6. Do not change its folder: copy it."""
    run_dir = project.folder / "straight"
    done = luspo(project.train(run_dir, *LAYOUTS["tp2ep2"], "--checkpoint.every", "3", "--checkpoint.keep", "9"),
                 project.folder / "straight-output")
    return Run(run_dir, done)
