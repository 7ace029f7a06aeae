"""The engines' environments and one running server for each kind.

ENGINE_VENVS names the folder in which tools/engine_venv.sh has made them (make test-engines does). Without an
environment the tests of its engine are skipped. Servers listen on free ports of the loopback and end with the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from luspo_megatron.config import RolloutConfig
from luspo_megatron.rollout.engine import load_engine_kind
from tests.engines.models import MOST_TOKENS, save_model
from tests.engines.side import FleetHost

ROOT = Path(__file__).parents[2]
VENVS = Path(os.environ.get("ENGINE_VENVS") or ROOT / ".venv-engines")
ENGINES = ("vllm", "sglang")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(400))


def python_of(engine: str) -> str:
    path = VENVS / engine / "bin/python"
    if not path.exists():
        pytest.skip(f"no {path}: make test-engines makes the engines' environments")
    return str(path)


def settings(engine: str, **changes: object) -> RolloutConfig:
    return RolloutConfig(**{"engine": engine, "engine_python": python_of(engine), "start_timeout": 240.0,  # type: ignore[arg-type]
                            "request_timeout": 120.0, **changes})


def start_host(engine: str, model: Path, folder: Path, **changes: object) -> FleetHost:
    config = settings(engine, **changes)
    host = FleetHost(config, load_engine_kind(engine), model=str(model), dtype="float32", folder=folder,
                     max_length=MOST_TOKENS, routing=(2, 2))
    host.start()
    return host


@dataclass(frozen=True)
class Folders:
    """Two models of the same shape with different weights; the engines start from ``a``."""

    a: Path
    b: Path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(*(save_model(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in (0, 1)))


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """pytest runs all tests of one engine before those of the next, so one server runs at a time."""
    python_of(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def host(engine: str, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetHost]:
    """One server of the kind, in a fleet that allows updates in flight."""
    started = start_host(engine, folders.a, tmp_path_factory.mktemp(engine), in_flight_updates=True,
                         routed_experts=engine == "sglang")
    yield started
    started.close()
