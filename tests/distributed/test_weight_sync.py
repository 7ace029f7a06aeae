"""Weight sync between processes: every layout's shards arrive as the folder's tensors; failures cost a repetition.

Engines are threads that receive through the real transports. Not covered here: real engines, NCCL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luspo_megatron.config import WeightSyncConfig
from tests.distributed.actor_jobs import Case
from tests.distributed.sync_jobs import push
from tests.tiny import save_model
from tests.workers import pool

SMALL = WeightSyncConfig(bucket_bytes=9000)  # the embedding has 77 kB, an expert's gate 10 kB: both are cut


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind.removesuffix("-tied"), tied=kind.endswith("-tied"))
            for kind in ("moe", "dense", "dense-tied")}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_received(result: dict[str, Any], folder: Path) -> None:
    want = tensors_of(folder)
    for received in result["received"]:
        assert set(received) == set(want)
        for name, tensor in want.items():
            np.testing.assert_array_equal(received[name], tensor, err_msg=name)


CASES = [("moe", Case()), ("moe", Case(world=2, tp=2, ep=2)), ("moe", Case(world=2, pp=2)), ("moe", Case(world=2)),
         ("moe", Case(world=4, tp=2, ep=2, etp=2)), ("moe", Case(world=4, tp=2, pp=2)), ("moe", Case(world=4, ep=4)),
         ("dense", Case(world=2, tp=2)), ("dense-tied", Case(world=2, pp=2)), ("dense-tied", Case(world=4, tp=2, pp=2))]


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[f"{k}-{c.layout}-{c.world}" for k, c in CASES])
def test_every_layout_arrives_bitwise_at_every_worker(kind: str, case: Case, folders: dict[str, Path]) -> None:
    result = pool(case.world).run(push, case, folders[kind], settings=SMALL, workers=2, versions=2)
    assert [r["error"] for r in result] == [""] * case.world
    assert result[0]["calls"] == ["connect 0", "update 1", "update 2"]
    assert_received(result[0], folders[kind])


def test_experts_arrive_under_their_global_numbers(folders: dict[str, Path]) -> None:
    """Each expert is filled with its global number; a local number taken for a global one would repeat 0 and 1."""
    case = Case(world=4, ep=4)
    result = pool(4).run(push, case, folders["moe"], settings=SMALL, mark_experts=True)[0]
    found = {}
    for name, values in result["received"][0].items():
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            assert values.min() == values.max()
            found.setdefault(expert, set()).add(float(values.flat[0]))
    assert found == {e: {float(e)} for e in range(8)}


def test_bfloat16_travels_as_the_folder_rounded_once(folders: dict[str, Path]) -> None:
    import torch

    result = pool(2).run(push, Case(world=2, tp=2, ep=2), folders["moe"], settings=SMALL, dtype="bfloat16")[0]
    for name, tensor in tensors_of(folders["moe"]).items():
        want = torch.from_numpy(tensor).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(result["received"][0][name], want, err_msg=name)


@pytest.mark.parametrize("case", [Case(world=2, tp=2, ep=2), Case(world=2, pp=2)], ids=["tp2xep2", "pp2"])
def test_a_worker_that_dies_in_a_push_costs_a_repetition(case: Case, folders: dict[str, Path]) -> None:
    result = pool(2).run(push, case, folders["moe"], settings=SMALL, workers=2, versions=2, faults={2: "die"},
                         gone_for=2)
    assert [r["error"] for r in result] == ["", ""]
    assert result[0]["calls"] == ["connect 0", "update 1", "update 2", "connect 1", "update 2"]
    [warning] = result[0]["warnings"]
    assert "weight version 2" in warning and "engine-0 was killed" in warning  # not only "connection closed"
    assert_received(result[0], folders["moe"])


def test_an_engine_that_never_joins_holds_nobody_up(folders: dict[str, Path]) -> None:
    result = pool(2).run(push, Case(world=2, tp=2, ep=2), folders["moe"], settings=SMALL, workers=2,
                         faults={0: "absent"}, timeout=200.0)
    assert result[0]["seconds"] < 100, "ranks waited for an engine that had already failed"
    assert [r["error"] for r in result] == ["", ""]
    assert result[0]["calls"] == ["connect 0", "connect 1", "update 1"]
    assert "died before it joined" in result[0]["warnings"][0]
    assert_received(result[0], folders["moe"])


def test_refusals_end_the_run_on_every_rank_with_the_engines_reason(folders: dict[str, Path]) -> None:
    case = Case(world=2, tp=2, ep=2)
    result = pool(2).run(push, case, folders["moe"], settings=SMALL, faults=dict.fromkeys(range(20), "refuse"))
    assert len(result[0]["warnings"]) == 3
    for one in result:
        assert one["error"].startswith("RunError") and "failed 4 times" in one["error"]
        assert "the engine refuses" in one["error"]
    result = pool(2).run(push, case, folders["moe"], settings=SMALL, faults={1: "bad"})
    assert [one["error"] for one in result] == ["UserError: the engine cannot take this model"] * 2
    assert result[0]["calls"] == ["connect 0", "update 1"]


def test_disk_transport_leaves_a_folder_that_transformers_reads(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    from transformers import AutoModelForCausalLM

    out = tmp_path / "weights"
    settings = WeightSyncConfig(bucket_bytes=9000, transport="disk", folder=str(out))
    case = Case(world=4, tp=2, pp=2)
    result = pool(4).run(push, case, folders["moe"], settings=settings, versions=3)
    assert [r["error"] for r in result] == [""] * 4
    assert_received(result[0], folders["moe"])
    assert [path.name for path in out.iterdir()] == ["weights-000003"]
    pushed = out / "weights-000003"
    assert not list(pushed.glob("*.partial"))
    shutil.copy(folders["moe"] / "config.json", pushed)
    model, info = AutoModelForCausalLM.from_pretrained(pushed, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    want = AutoModelForCausalLM.from_pretrained(folders["moe"]).state_dict()
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), want[name].numpy(), err_msg=name)
