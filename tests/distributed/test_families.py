"""Families beyond Qwen3: export and weight push give back the source tensors, and a family comes from outside.

Log-probs, gradients and the optimizer step of the built-in ones are in test_layouts.py; here is the same for the family
of docs/new_model.md, whose code is run as it stands there.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luspo_megatron.convert.to_hf import convert as to_hf
from luspo_megatron.convert.to_megatron import Layout, convert
from luspo_megatron.errors import UserError
from luspo_megatron.preflight import check_weights
from luspo_megatron.weights.architecture import FAMILIES, RopeScaling, parse_architecture, read_architecture
from luspo_megatron.weights.table import WeightTable
from tests.distributed.actor_jobs import Case, actor_of, assemble, checkpoint_keys
from tests.distributed.convert_jobs import weights_twice
from tests.distributed.test_layouts import Reference, close, run
from tests.tiny import config_of, samples_of, save_model
from tests.workers import pool

DOCUMENT = Path(__file__).parents[2] / "docs" / "new_model.md"
OUTSIDE = "phi3_family:PHI3"


def look_in(rank: int, folder: Any) -> None:
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a module made of the document's Python block, on the path of this process and of the workers."""
    folder = tmp_path_factory.mktemp("outside")
    [code] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "phi3_family.py").write_text(code, encoding="utf-8")
    look_in(0, folder)
    pool(2).run(look_in, folder)
    return folder


def export_and_push(rank: int, case: Case, folder: Any, out: Any) -> list[str]:
    """Exports; then rank 0, the only source under TP, loads all buckets into an engine's model with other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from luspo_megatron.rollout.hf_weights import Loader, check_manifest, on_disk_locations
    from luspo_megatron.weights.export import export_hf
    from luspo_megatron.weights.gather import ShardGatherer, fill_bucket
    from luspo_megatron.weights.plan import plan_sync

    with actor_of(rank, case, folder, trainable=False) as actor:
        export_hf(actor.gpt, actor.table, actor.ranks, source_folder=folder, out=out, dtype="float32")
        plan = plan_sync(actor.table, actor.ranks.layout, "float32", 20_000)
        assert plan.sources == (0,)
        model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(folder).config)
        loader = Loader(on_disk_locations(model))
        check_manifest(plan.manifest(1), loader.locations)
        for unit, tensors in ShardGatherer(actor.gpt, actor.table, actor.ranks).walk(plan, torch.float32):
            for bucket in unit.buckets if tensors is not None else ():
                buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
                fill_bucket(buffer, tensors, bucket.slices)
                loader.load(bucket, buffer)
        if rank:
            return []
        loader.verify()
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        return [name for name, value in model.state_dict().items() if not torch.equal(value, want[name])]


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(("kind", "tied", "family"), [
    ("qwen2", False, ""), ("qwen2", True, ""), ("llama3", True, ""), ("mistral", False, ""), ("phi3", False, OUTSIDE)])
def test_export_and_push(kind: str, tied: bool, family: str, outside: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", kind, tied=tied)
    out = tmp_path / "out"
    different = pool(2).run(export_and_push, Case(world=2, tp=2, family=family), folder, out)
    assert different == [[], []]
    check_weights(str(out), family)  # what `luspo train` asks before it starts
    want, got = tensors_of(folder), tensors_of(out)
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_a_family_from_outside_converts(outside: Path, tmp_path: Path) -> None:
    """Its one tensor is put into megatron's order (q, k, v by group), and back; the folder remembers the family."""
    folder = save_model(tmp_path / "model", "phi3")
    convert(folder, tmp_path / "m", Layout(tp=2, pp=2), family=OUTSIDE, workers=1, quiet=True)
    case = Case(world=2, tp=2, family=OUTSIDE)
    for first, second in pool(2).run(weights_twice, case, folder, tmp_path / "m"):
        assert first.keys() == second.keys() and any("linear_qkv" in name for name in first)
        for name in first:
            np.testing.assert_array_equal(first[name][2], second[name][2], err_msg=name)
    to_hf(tmp_path / "m", tmp_path / "back", workers=1, quiet=True)
    want, got = tensors_of(folder), tensors_of(tmp_path / "back")
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("case", [Case(world=2, tp=2, family=OUTSIDE), Case(world=2, pp=2, family=OUTSIDE)],
                         ids=lambda case: str(case.layout))
def test_a_family_from_outside(case: Case, outside: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "phi3")
    reference = Reference(folder, samples_of(seed=5, groups=5, group_size=3))
    results = run(dataclasses.replace(case, distributed_optimizer=False), folder, reference)
    logprobs = {i: v for result in results for i, v in result["logprobs"].items()}
    for i, want in enumerate(reference.logprobs):
        close(f"log-probs of sample {i}", logprobs[i], want, 1e-5)
    table = WeightTable(read_architecture(folder, OUTSIDE))
    gradients = assemble(results, "gradients", table)
    assert set(gradients) == set(reference.gradients) and any("qkv_proj" in name for name in gradients)
    for name, want in reference.gradients.items():
        close(f"gradient of {name}", gradients[name], want, 1e-5)
    parameters = assemble(results, "parameters", table)
    for name, want in reference.parameters.items():
        assert np.abs(parameters[name] - want).max() <= 1e-6, name


def test_checkpoint_keys_of_a_family_with_biases(tmp_path: Path) -> None:
    """As the TE spec names them: Qwen3's (te_keys_dense.txt) without the norms on queries and keys, and the bias."""
    folder = save_model(tmp_path / "model", "qwen2")
    [keys] = pool(1).run(checkpoint_keys, Case(), folder)
    qwen3 = (Path(__file__).parent / "te_keys_dense.txt").read_text().split()
    bias = {key.replace("linear_qkv.weight", "linear_qkv.bias") for key in qwen3 if key.endswith("linear_qkv.weight")}
    assert bias and set(keys) == {key for key in qwen3 if "q_layernorm" not in key and "k_layernorm" not in key} | bias


# --- what is refused -------------------------------------------------------------------------------------------------


def refusal(kind: str, changes: dict[str, Any], family: str = "") -> str:
    with pytest.raises(UserError) as caught:
        parse_architecture(config_of(kind).to_dict() | changes, family=family)
    return str(caught.value)


def test_an_unsupported_architecture_names_the_supported_ones_and_the_way_out() -> None:
    text = refusal("llama", {"architectures": ["GemmaForCausalLM"]})
    assert "GemmaForCausalLM is not supported" in text and "docs/new_model.md" in text
    for family in FAMILIES.values():
        assert all(name in text for name in family.architectures)


@pytest.mark.parametrize(("kind", "changes", "says"), [
    ("llama", {"attention_bias": True}, "attention_bias=True is not supported; only False"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("mistral", {"sliding_window": 128}, "sliding_window=128 is not supported; where no sequence is longer"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "only default and llama3"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
     "no positive number for low_freq_factor, high_freq_factor, original_max_position_embeddings"),
])
def test_what_would_be_computed_wrongly_is_refused(kind: str, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(kind, changes)


def test_a_missing_sliding_window_is_mistrals_default_of_4096() -> None:
    config = config_of("mistral").to_dict() | {"max_position_embeddings": 32768}
    del config["sliding_window"]
    with pytest.raises(UserError, match="sliding_window=4096"):
        parse_architecture(config)
    assert parse_architecture(config | {"sliding_window": None}).family == "mistral"
    assert parse_architecture(config | {"sliding_window": 32768}).family == "mistral"


def test_rope_scaling_of_either_version_of_transformers() -> None:
    new = config_of("llama3").to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in new["rope_parameters"].items() if key != "rope_theta"}
    old |= {"rope_theta": 5e2, "rope_scaling": scaling}
    assert parse_architecture(new) == parse_architecture(old)
    assert parse_architecture(old).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_names_of_families(outside: Path) -> None:
    assert parse_architecture(config_of("llama").to_dict() | {"architectures": ["YiForCausalLM"]}, family="llama")
    assert "take qwen3, qwen3_moe" in refusal("llama", {}, "lama")
    assert "no attribute 'PHI4'" in refusal("phi3", {}, "phi3_family:PHI4")
    assert "is a dict, not a Family" in refusal("phi3", {}, "phi3_family:STACKED")
    assert "LlamaForCausalLM is not of the family" in refusal("llama", {}, OUTSIDE)
    assert "cannot import 'no_such_family'" in refusal("phi3", {}, "no_such_family:X")
    assert "partial_rotary_factor=0.5" in refusal("phi3", {"partial_rotary_factor": 0.5}, OUTSIDE)
    assert "sliding_window=2047 is not supported; only None" in refusal("phi3", {"sliding_window": 2047}, OUTSIDE)
