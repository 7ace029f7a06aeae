"""Hugging Face -> Megatron -> Hugging Face is the same bit for bit, and the middle is what other readers expect.

The Megatron side is read with torch.distributed.checkpoint's own loader and the Hugging Face side with the safetensors
library, so neither check uses the code under test. Loading with megatron-core under other layouts: tests/distributed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from luspo_megatron.convert import pieces as pieces_module
from luspo_megatron.convert import to_megatron as to_megatron_module
from luspo_megatron.convert.commands import hf_to_megatron, megatron_to_hf, verify
from luspo_megatron.convert.to_hf import convert as to_hf
from luspo_megatron.convert.to_megatron import Layout, convert
from luspo_megatron.errors import UserError
from luspo_megatron.weights.architecture import parse_architecture
from luspo_megatron.weights.table import WeightTable
from tests.convert_helpers import config_json, dist_tensors, make_hf, same_bits, tensors_of, write_tensors

KEYS = Path(__file__).parents[1] / "distributed"
SAVED = Layout(tp=2, pp=2, ep=2)


def there_and_back(hf: Path, folder: Path, layout: Layout, **options: object) -> Path:
    folder.mkdir(exist_ok=True)
    convert(hf, folder / "megatron", layout, workers=2, quiet=True)
    to_hf(folder / "megatron", folder / "back", workers=2, quiet=True, **options)  # type: ignore[arg-type]
    return folder / "back"


@pytest.mark.parametrize(("kind", "tied", "dtype", "layout"), [
    ("moe", False, "float32", SAVED), ("moe", True, "bfloat16", Layout(ep=4)), ("dense", False, "bfloat16", Layout()),
    ("dense", True, "float32", Layout(tp=2, pp=4)), ("qwen2", True, "bfloat16", Layout(tp=2, pp=2)),
    ("qwen2", False, "float32", Layout()), ("llama", True, "float32", Layout(tp=2)),
    ("llama", False, "bfloat16", Layout(pp=2)), ("mistral", False, "bfloat16", Layout(tp=2, pp=2)),
    ("mistral", True, "float32", Layout())], ids=str)
def test_round_trip(kind: str, tied: bool, dtype: str, layout: Layout, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", kind, tied=tied, dtype=dtype, files=3)
    back = there_and_back(hf, tmp_path, layout, shard_bytes=100_000)
    same_bits(tensors_of(back), tensors_of(hf))
    assert ("lm_head.weight" in tensors_of(back)) != tied
    index = json.loads((back / "model.safetensors.index.json").read_text())
    on_disk = {name: file.name for file in back.glob("*.safetensors") for name in tensors_of_file(file)}
    assert index["weight_map"] == on_disk and len(set(on_disk.values())) > 2
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors_of(hf).values())
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if name != "config.json":
            assert (back / name).read_bytes() == (hf / name).read_bytes()
        assert json.loads((back / name).read_text()) == json.loads((hf / name).read_text())
    assert not list(tmp_path.glob("*.partial"))


def tensors_of_file(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        return list(handle.keys())


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_megatron_side(kind: str, tmp_path: Path) -> None:
    """Keys of the Transformer Engine spec; shapes, fusions and padding as megatron-core lays them out."""
    hf = make_hf(tmp_path / "hf", kind)
    convert(hf, tmp_path / "out", SAVED if kind == "moe" else Layout(tp=2, pp=2), workers=2, quiet=True)
    have, source = dist_tensors(tmp_path / "out/dist"), tensors_of(hf)
    assert sorted(have) == (KEYS / f"te_keys_{kind}.txt").read_text().split()
    embedding = have["embedding.word_embeddings.weight"]
    assert embedding.shape == (384, 64) and not embedding[301:].any()
    assert torch.equal(embedding[:301], source["model.embed_tokens.weight"])
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        qkv = have["decoder.layers.self_attention.linear_qkv.weight"][layer].view(2, 2 * 24 + 2 * 24, 64)
        q, k, v = (source[prefix + f"self_attn.{x}_proj.weight"].view(2, -1, 64) for x in "qkv")
        assert torch.equal(qkv, torch.cat([q, k, v], 1))
        assert torch.equal(have["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][layer],
                           source[prefix + "input_layernorm.weight"])
        if kind == "dense":
            assert torch.equal(have["decoder.layers.mlp.linear_fc1.weight"][layer], torch.cat(
                [source[prefix + "mlp.gate_proj.weight"], source[prefix + "mlp.up_proj.weight"]]))
            continue
        for e in range(8):
            expert = f"{prefix}mlp.experts.{e}."
            assert torch.equal(have["decoder.layers.mlp.experts.experts.linear_fc1.weight"][layer, e], torch.cat(
                [source[expert + "gate_proj.weight"], source[expert + "up_proj.weight"]]))
            assert torch.equal(have["decoder.layers.mlp.experts.experts.linear_fc2.weight"][layer, e],
                               source[expert + "down_proj.weight"])


def test_experts_keep_their_numbers(tmp_path: Path) -> None:
    """Expert e is filled with e; a local number taken for a global one would repeat 0 and 1 (EP=4)."""
    hf = make_hf(tmp_path / "hf", "moe")
    filled = {name: torch.full_like(t, float(name.split(".experts.")[1].split(".")[0])) if ".experts." in name else t
              for name, t in tensors_of(hf).items()}
    write_tensors(hf, filled)
    back = there_and_back(hf, tmp_path, Layout(ep=4))
    fc2 = dist_tensors(tmp_path / "megatron/dist")["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert fc2.amax((0, 2, 3)).tolist() == fc2.amin((0, 2, 3)).tolist() == list(range(8))
    same_bits(tensors_of(back), filled)


def test_experts_fused_in_memory(tmp_path: Path) -> None:
    """A transformers 5 state dict saved as it is: experts.gate_up_proj [E, 2I, H], experts.down_proj [E, H, I]."""
    hf = make_hf(tmp_path / "hf", "moe")
    whole = tensors_of(hf)
    fused = {name: t for name, t in whole.items() if ".experts." not in name}
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts."
        expert = [{x: whole[f"{name}{e}.{x}_proj.weight"] for x in ("gate", "up", "down")} for e in range(8)]
        fused[name + "gate_up_proj"] = torch.stack([torch.cat([x["gate"], x["up"]]) for x in expert])
        fused[name + "down_proj"] = torch.stack([x["down"] for x in expert])
    write_tensors(hf, fused, files=2)
    same_bits(tensors_of(there_and_back(hf, tmp_path, SAVED)), whole)


def test_transformers_reads_what_is_written_and_writes_what_is_read(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.tiny import save_model

    hf = save_model(tmp_path / "hf", "moe")
    back = there_and_back(hf, tmp_path, SAVED)
    models = [AutoModelForCausalLM.from_pretrained(f, output_loading_info=True) for f in (hf, back)]
    assert not models[1][1]["missing_keys"] and not models[1][1]["unexpected_keys"]
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert torch.equal(models[0][0](ids).logits, models[1][0](ids).logits)


def test_tensors_larger_than_a_piece_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces smaller than every matrix: cut by rows, padded once, put together bit for bit."""
    hf = make_hf(tmp_path / "hf", "moe", files=2)
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 5000)
    back = there_and_back(hf, tmp_path, SAVED)
    same_bits(tensors_of(back), tensors_of(hf))
    have = dist_tensors(tmp_path / "megatron/dist")
    assert torch.equal(have["embedding.word_embeddings.weight"][:301], tensors_of(hf)["model.embed_tokens.weight"])
    chunks = json.loads((tmp_path / "megatron/conversion.json").read_text())
    assert len(chunks["tensors"]) == len(tensors_of(hf))


def test_files_are_grouped_by_stage_and_expert_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = make_hf(tmp_path / "hf", "moe")
    monkeypatch.setattr(to_megatron_module, "SMALLEST_FILE", 300_000)
    summary = convert(hf, tmp_path / "out", SAVED, workers=2, quiet=True)
    names = {p.name for p in (tmp_path / "out/dist").glob("*.distcp")}
    assert {name.split("_")[2] for name in names} == {"0", "1", "2", "3"} and len(names) == summary.parts > 4
    with pytest.raises(UserError, match="--tp 4 does not divide the 2 key/value heads; --ep 3"):
        convert(hf, tmp_path / "other", Layout(tp=4, ep=3))


def test_dtype(tmp_path: Path) -> None:
    """--dtype on the way in and out; config.json says so; verify compares after a cast."""
    hf = make_hf(tmp_path / "hf", "dense")
    m, b, f = (str(tmp_path / x) for x in ("m", "b", "f"))
    assert hf_to_megatron(["--hf", str(hf), "--out", m, "--dtype", "bfloat16", "--workers", "1", "--quiet"]) == 0
    assert megatron_to_hf(["--megatron", m, "--out", b, "--workers", "1", "--quiet"]) == 0
    assert megatron_to_hf(["--megatron", m, "--out", f, "--dtype", "float32", "--workers", "1", "--quiet"]) == 0
    want = {name: t.bfloat16() for name, t in tensors_of(hf).items()}
    same_bits(tensors_of(Path(b)), want)
    same_bits(tensors_of(Path(f)), {name: t.float() for name, t in want.items()})
    assert [json.loads((Path(x) / "config.json").read_text())["dtype"] for x in (m, b, f)] == [
        "bfloat16", "bfloat16", "float32"]
    assert verify([str(hf), m, "--quiet"]) == 0


def test_a_config_that_states_another_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights decide: nothing is cast, the copy says what they are, with a warning. None stated: as it was."""
    hf = make_hf(tmp_path / "hf", "dense")
    (hf / "config.json").write_text(json.dumps(config_json("dense") | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    assert hf_to_megatron(["--hf", str(hf), "--out", str(tmp_path / "m"), "--quiet", "--workers", "1"]) == 0
    assert "says dtype=bfloat16, the weights are float32" in capsys.readouterr().err
    said = json.loads((tmp_path / "m/config.json").read_text())
    assert said["dtype"] == said["torch_dtype"] == "float32"
    silent = {key: value for key, value in config_json("dense").items() if key != "dtype"}
    (hf / "config.json").write_text(json.dumps(silent))
    back = there_and_back(hf, tmp_path / "silent", Layout())
    assert (back / "config.json").read_bytes() == (hf / "config.json").read_bytes()


@pytest.mark.parametrize(("change", "problem"), [
    ({"rope_parameters": None, "rope_theta": 1e6}, None), ({"rope_parameters": {"rope_theta": 1e6}}, None),
    ({"rope_parameters": None}, "no rope base")])
def test_rope_theta(change: dict[str, object], problem: str | None, tmp_path: Path,
                    capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf(tmp_path / "hf", "dense")
    config = config_json("dense") | change
    (hf / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    code = hf_to_megatron(["--hf", str(hf), "--out", str(tmp_path / "m"), "--quiet", "--workers", "1"])
    if problem:
        assert code == 2 and problem in capsys.readouterr().err and not (tmp_path / "m").exists()
    else:
        assert code == 0
        manifest = json.loads((tmp_path / "m/conversion.json").read_text())
        assert manifest["architecture"]["rope_theta"] == 1e6
        kept = json.loads((tmp_path / "m/config.json").read_text())
        assert kept.get("rope_theta") == change.get("rope_theta")


def test_help_shows_three_worked_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command, name in ((hf_to_megatron, "hf_to_megatron.py"), (megatron_to_hf, "megatron_to_hf.py"),
                          (verify, "verify.py")):
        with pytest.raises(SystemExit) as stop:
            command(["--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0
        assert sum(line.startswith(f"  {name} ") for line in text.split("worked examples:")[1].splitlines()) == 3


def test_every_element_is_covered_once() -> None:
    """Pieces of both families tile every tensor of both sides exactly once, also when cut."""
    for kind in ("dense", "moe"):
        table = WeightTable(parse_architecture(config_json(kind)))
        pieces = pieces_module.PieceMap(table, 384)
        counts = {key: torch.zeros(shape, dtype=torch.int8) for key, shape in pieces.global_shapes().items()}
        rows = {name: torch.zeros(shape[0], dtype=torch.int8) for name, shape in table.hf_shapes.items()}
        for entry in pieces.entries:
            for piece in pieces.pieces(entry, 2**20):  # an item size that cuts every matrix into rows
                region = piece.region
                box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
                counts[region.key][box] += 1
                for name in piece.names:
                    if len(piece.names) > 1:
                        rows[name] += 1
                    else:
                        rows[name][piece.start : piece.stop] += 1
        assert all((count == 1).all() for count in (*counts.values(), *rows.values()))
