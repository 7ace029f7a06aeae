"""Loading into shards, gathering them again and exporting give back the folder's tensors, bit by bit, in every layout.

Expert e of layer l is filled with a number that says so: a local expert or layer number taken for a global one shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.distributed.actor_jobs import Case
from tests.distributed.split_jobs import gather_weights
from tests.tiny import save_model
from tests.workers import pool

CASES = [("moe", Case()), ("moe", Case(world=4, ep=4)), ("moe", Case(world=4, tp=2, ep=2)),
         ("moe", Case(world=4, tp=2, ep=2, etp=2)), ("moe", Case(world=4, pp=2, ep=2)), ("moe", Case(world=4, pp=4)),
         ("moe-tied", Case(world=4, tp=2, pp=2)), ("dense", Case(world=2, tp=2)), ("dense", Case(world=2, pp=2)),
         ("dense-tied", Case(world=2, tp=2)), ("dense-tied", Case(world=2, pp=2))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name in ("moe", "moe-tied", "dense", "dense-tied"):
        kind, _, tied = name.partition("-")
        folder = save_model(tmp_path_factory.mktemp(name), kind, tied=bool(tied))
        weights = load_file(folder / "model.safetensors")
        for key, value in weights.items():
            if ".experts." in key:
                layer, expert = int(key.split(".")[2]), int(key.split(".")[5])
                value[...] = 100 * layer + expert
        save_file(weights, folder / "model.safetensors")
        out[name] = folder
    return out


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.layout}" for name, case in CASES])
def test_round_trip(name: str, case: Case, folders: dict[str, Path], tmp_path: Path) -> None:
    want = load_file(folders[name] / "model.safetensors")
    sent: dict[str, Any] = {}
    for part in pool(case.world).run(gather_weights, case, folders[name], 10_000, tmp_path / "export"):
        assert not sent.keys() & part.keys(), "produced twice"
        sent |= part
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())["weight_map"]
    exported: dict[str, Any] = {}
    for path in (tmp_path / "export").glob("*.safetensors"):
        weights = load_file(path)
        assert all(index[key] == path.name for key in weights)
        exported |= weights
    assert exported.keys() == index.keys() == sent.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_array_equal(sent[key], value, err_msg=key)
        np.testing.assert_array_equal(exported[key], value, err_msg=key)
    assert ("lm_head.weight" in sent) is not name.endswith("tied")


def test_transformers_takes_the_export(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("moe", "dense-tied"):
        case = Case(world=2, tp=2) if name.startswith("dense") else Case(world=2, tp=2, ep=2)
        pool(2).run(gather_weights, case, folders[name], 10**6, tmp_path / name)
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        want = AutoModelForCausalLM.from_pretrained(folders[name]).state_dict()
        for key, value in model.state_dict().items():
            assert value.equal(want[key]), key
