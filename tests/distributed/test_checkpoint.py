"""Checkpoints resume exactly under the same layout and to rounding under another one; keys are the TE spec's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luspo_megatron.weights.architecture import read_architecture
from luspo_megatron.weights.table import WeightTable
from tests.distributed.actor_jobs import Case, assemble, checkpoint_keys, resume_from, save_after
from tests.tiny import samples_of, save_model
from tests.workers import pool

SAVED = Case(world=4, tp=2, pp=1, ep=2)
OTHERS = [SAVED, Case(), Case(world=2, pp=2), Case(world=2, ep=2), Case(world=4, tp=2, pp=2, ep=2),
          Case(world=4, tp=2, ep=2, etp=2), Case(world=2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_model(tmp_path_factory.mktemp("model"), "moe")
    samples = samples_of(seed=8, groups=6, group_size=4)
    advantages = np.random.default_rng(0).normal(size=len(samples))
    out = tmp_path_factory.mktemp("checkpoints")
    results = pool(SAVED.world).run(save_after, SAVED, folder, samples, advantages, out, 3, 6)
    return folder, samples, advantages, out / "step-000003", results


@pytest.mark.parametrize("case", OTHERS, ids=lambda c: str(c.layout))
def test_resume(case: Case, saved: Any) -> None:
    folder, samples, advantages, path, straight = saved
    resumed = pool(case.world).run(resume_from, case, folder, samples, advantages, path, 3, 6)
    assert resumed[0]["state"]["weight_version"] == 7
    want, got = np.array(straight[0]["losses"]), np.array(resumed[0]["losses"])
    assert np.abs(want).min() > 1e-4
    table = WeightTable(read_architecture(folder))
    parameters = assemble(resumed, "parameters", table)
    if case == SAVED:
        assert (want == got).all()
        for name, value in assemble(straight, "parameters", table).items():
            np.testing.assert_array_equal(parameters[name], value, err_msg=name)
    else:
        assert np.abs(got[0] - want[0]) <= 1e-5 * np.abs(want[0])
        for name, value in assemble(straight, "parameters", table).items():
            assert np.abs(parameters[name] - value).max() <= 1e-4 * np.abs(value).max(), name


def test_a_checkpoint_of_another_model_is_refused(saved: Any, tmp_path: Path) -> None:
    _, samples, advantages, path, _ = saved
    other = save_model(tmp_path / "model", "moe", layers=2)
    with pytest.raises(RuntimeError, match="UserError: .* of another model than model.hf: num_layers 4 instead of 2"):
        pool(1).run(resume_from, Case(), other, samples, advantages, path, 3, 6)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_keys_are_those_of_the_transformer_engine_spec(kind: str, tmp_path: Path) -> None:
    """The list is what megatron-core 0.19's TE GPT spec gives for Qwen3 with grouped experts (gpt_layer_specs.py,
    experts.py); a CPU login node must write what a GPU job reads."""
    folder = save_model(tmp_path / "model", kind)
    [keys] = pool(1).run(checkpoint_keys, Case(), folder)
    assert keys == (Path(__file__).parent / f"te_keys_{kind}.txt").read_text().split()
