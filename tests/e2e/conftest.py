"""One project and one uninterrupted run, shared by all end-to-end tests of a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.project import LAYOUTS, Command, Project, luspo


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A whole run on a busy machine takes longer than the limit of other tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))


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
