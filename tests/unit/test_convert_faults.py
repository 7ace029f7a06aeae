"""Damaged and incomplete checkpoints end with exit code 1 and the names of tensors and files; bad options with 2."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from luspo_megatron.convert import workspace
from luspo_megatron.convert.commands import hf_to_megatron, megatron_to_hf, verify
from luspo_megatron.convert.to_hf import convert as to_hf
from luspo_megatron.convert.to_megatron import Layout, convert
from tests.convert_helpers import make_hf, tensors_of, write_tensors

EXPERT = "model.layers.1.mlp.experts.6.down_proj.weight"
QUIET = ["--quiet", "--workers", "2"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf/ and its conversions m/ and back/."""
    folder = tmp_path_factory.mktemp("good")
    make_hf(folder / "hf", "moe", files=3, num_hidden_layers=2)
    convert(folder / "hf", folder / "m", Layout(pp=2, ep=2), workers=2, quiet=True)
    to_hf(folder / "m", folder / "back", shard_bytes=200_000, workers=2, quiet=True)
    return folder


def copy(good: Path, name: str, target: Path) -> Path:
    return Path(shutil.copytree(good / name, target / name))


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def rename_in_file(folder: Path, old: str, new: str) -> None:
    """Same length, in the header of the shard that has it and in the index."""
    assert len(old) == len(new)
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))


def drop_tensor(folder: Path) -> None:
    tensors = tensors_of(folder)
    del tensors[EXPERT]
    write_tensors(folder, tensors, files=2)


def add_tensor(folder: Path) -> None:
    write_tensors(folder, tensors_of(folder) | {"model.layers.0.mlp.extra.weight": torch.zeros(3)}, files=2)


def transpose(folder: Path) -> None:
    tensors = tensors_of(folder)
    write_tensors(folder, tensors | {EXPERT: tensors[EXPERT].t().contiguous()}, files=2)


def ghost(folder: Path) -> None:
    edit_index(folder, lambda m: m.update({"model.layers.9.ghost.weight": next(iter(m.values()))}))


def unlisted(folder: Path) -> None:
    edit_index(folder, lambda m: m.pop(EXPERT))


def misplaced(folder: Path) -> None:
    edit_index(folder, lambda m: m.update({EXPERT: next(v for v in m.values() if v != m[EXPERT])}))


def truncate(folder: Path) -> None:
    os.truncate(shard_two(folder), shard_two(folder).stat().st_size - 100)


def shard_two(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


@pytest.mark.parametrize(("damage", "message"), [
    (drop_tensor, f"missing: {EXPERT}"), (add_tensor, "unexpected: model.layers.0.mlp.extra.weight"),
    (transpose, rf"wrong shape: {EXPERT} \(40, 64\) instead of \(64, 40\)"),
    (ghost, "in the index but in no file: model.layers.9.ghost.weight"),
    (unlisted, f"in a file but not in the index: {EXPERT}"),
    (misplaced, f"in another file than the index says: {EXPERT}"),
    (lambda f: rename_in_file(f, EXPERT, EXPERT.replace(".6.", ".9.")),
     rf"missing: {EXPERT}; unexpected: model.layers.1.mlp.experts.9.down_proj.weight"),
    (lambda f: shard_two(f).unlink(), "files named by .* are missing: model-00002-of-00003.safetensors"),
    (truncate, "model-00002-of-00003.safetensors: .*truncated"),
    (lambda f: shard_two(f).write_bytes(b"\x00" * 5), "model-00002-of-00003.safetensors: .*truncated"),
    (lambda f: shard_two(f).write_bytes(b"<html>not found</html>" * 10), "model-00002-of-00003.safetensors: not a"),
], ids=lambda x: getattr(x, "__name__", None))
def test_a_bad_hugging_face_folder(damage: Callable[[Path], Any], message: str, good: Path, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    hf = copy(good, "hf", tmp_path)
    damage(hf)
    code = hf_to_megatron(["--hf", str(hf), "--out", str(tmp_path / "out"), *QUIET])
    error = capsys.readouterr().err
    assert code == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()
    assert verify([str(hf), str(good / "m"), *QUIET]) == 1


def edit_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "dist/.metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"


def rename_key(metadata: Any) -> None:
    metadata.state_dict_metadata["decoder.layers.mlp.experts.linear_fc2"] = metadata.state_dict_metadata.pop(FC2)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: edit_metadata(f, lambda m: m.state_dict_metadata.pop(FC2)), f"missing: {FC2}"),
    (lambda f: edit_metadata(f, rename_key), f"missing: {FC2}; unexpected: decoder.layers.mlp.experts.linear_fc2"),
    (lambda f: edit_metadata(f, lambda m: m.state_dict_metadata[FC2].chunks.pop()), f"chunks missing .* in: {FC2}"),
    (lambda f: edit_metadata(f, lambda m: m.state_dict_metadata[FC2].chunks.__setitem__(
        0, m.state_dict_metadata[FC2].chunks[1])), f"chunks missing or overlapping in: {FC2}"),
    (lambda f: os.truncate(f / "dist/__2_0.distcp", 5000), "truncated files: __2_0.distcp has 5000 bytes"),
    (lambda f: (f / "dist/__1_0.distcp").unlink(), "files are missing: __1_0.distcp"),
    (lambda f: (f / "dist/.metadata").write_bytes(b"abc"), ".metadata: cannot be read"),
    (lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("301", "400")),
     "has 384 rows, config.json says vocab_size=400"),
])
def test_a_bad_megatron_folder(damage: Callable[[Path], Any], message: str, good: Path, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    m = copy(good, "m", tmp_path)
    damage(m)
    code = megatron_to_hf(["--megatron", str(m), "--out", str(tmp_path / "out"), *QUIET])
    error = capsys.readouterr().err
    assert code == 1 and re.search(message, error), error
    assert not (tmp_path / "out").exists()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_named(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a safetensors shard and in a .distcp file: verify names the file and the tensor, alone and compared."""
    back, m = copy(good, "back", tmp_path), copy(good, "m", tmp_path)
    assert verify([str(back), str(m), *QUIET]) == 0
    capsys.readouterr()
    shard = shard_two(back)
    flip(shard, shard.stat().st_size - 10)
    assert verify([str(back), *QUIET]) == 1
    error = capsys.readouterr().err
    assert shard.name in error and "bytes differ" in error and error.count("bytes differ") == 1

    metadata = pickle.loads((m / "dist/.metadata").read_bytes())
    info = next(v for k, v in metadata.storage_data.items() if k.fqn == FC2 and tuple(k.offset) == (1, 6, 0, 0))
    file = m / "dist" / info.relative_path
    data = file.read_bytes()
    value = tensors_of(good / "hf")[EXPERT].numpy().tobytes()
    flip(file, data.index(value) + 20)
    for arguments in ([str(m)], [str(m), str(good / "hf")]):
        assert verify([*arguments, *QUIET]) == 1
        error = capsys.readouterr().err
        assert f"{file}: {EXPERT}: bytes differ" in error


def test_carried_files_are_checked(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    m = copy(good, "m", tmp_path)
    (m / "tokenizer.json").write_text("{}")
    assert verify([str(m), *QUIET]) == 1
    assert "tokenizer.json: missing or changed" in capsys.readouterr().err


def test_different_weights_and_configs_differ(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_hf(tmp_path / "other", "moe", num_hidden_layers=2, seed=1)
    assert verify([str(good / "hf"), str(other), *QUIET]) == 1
    assert "model.embed_tokens.weight: bytes differ" in capsys.readouterr().err
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 1e4
    (other / "config.json").write_text(json.dumps(config))
    assert verify([str(good / "hf"), str(other), *QUIET]) == 1
    assert "rope_theta: 500000.0 and 10000.0" in capsys.readouterr().err


def test_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tied head on disk must be the embedding; an untied one must be there."""
    def run(hf: Path, out: str) -> int:
        return hf_to_megatron(["--hf", str(hf), "--out", str(tmp_path / out), *QUIET])

    tied = make_hf(tmp_path / "tied", "dense", tied=True, num_hidden_layers=2)
    tensors = tensors_of(tied)
    embedding = tensors["model.embed_tokens.weight"]
    write_tensors(tied, tensors | {"lm_head.weight": embedding.clone()})
    assert run(tied, "a") == 0
    write_tensors(tied, tensors | {"lm_head.weight": embedding + 1})
    assert run(tied, "b") == 1 and "lm_head.weight differs" in capsys.readouterr().err
    untied = make_hf(tmp_path / "untied", "dense", num_hidden_layers=2)
    write_tensors(untied, tensors)
    assert run(untied, "c") == 1 and "missing: lm_head.weight" in capsys.readouterr().err


def test_tokenizer_and_generation_config_fit_the_weights(good: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str) -> tuple[int, str]:
        return (hf_to_megatron(["--hf", str(hf), "--out", str(tmp_path / name), *QUIET]), capsys.readouterr().err)

    hf = copy(good, "hf", tmp_path)
    tokenizer = json.loads((hf / "tokenizer.json").read_text())
    (hf / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": [{"id": 301, "content": "x"}]}))
    code, error = run("a")
    assert code == 1 and "tokenizer has id 301, the embedding only 301 rows" in error
    (hf / "tokenizer.json").unlink()
    code, error = run("b")
    assert code == 0 and "warning" in error and "no tokenizer" in error
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 999]}))
    code, error = run("c")
    assert code == 1 and "eos_token_id=999 outside" in error


def test_options(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        return hf_to_megatron([*map(str, arguments), *QUIET]), capsys.readouterr().err

    hf = good / "hf"
    assert run("--hf", tmp_path / "none", "--out", tmp_path / "o") == (
        2, f"hf_to_megatron.py: {tmp_path / 'none'}: no such folder\n")
    code, error = run("--hf", good / "m", "--out", tmp_path / "o")
    assert code == 2 and "is a Megatron checkpoint" in error
    code, error = run("--hf", hf, "--out", good / "m")
    assert code == 2 and "already exists" in error
    code, error = run("--hf", hf, "--out", tmp_path / "a/b")
    assert code == 2 and "no such folder" in error
    (tmp_path / "o.partial").mkdir()
    code, error = run("--hf", hf, "--out", tmp_path / "o")
    assert code == 2 and "--resume" in error
    code = megatron_to_hf(["--megatron", str(hf), "--out", str(tmp_path / "p"), *QUIET])
    assert code == 2 and "is a Hugging Face folder" in capsys.readouterr().err
    (bare := tmp_path / "bare").mkdir()
    shutil.copytree(good / "m/dist", bare / "dist")
    code = megatron_to_hf(["--megatron", str(bare), "--out", str(tmp_path / "p"), *QUIET])
    assert code == 2 and "--hf-config" in capsys.readouterr().err
    assert megatron_to_hf(["--megatron", str(bare), "--hf-config", str(hf), "--out", str(tmp_path / "p"), *QUIET]) == 0


def test_a_full_disk_is_one_message(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Seen before the first byte, and met while writing (a limit on file size stands in for a quota), both ways."""
    ways = [(hf_to_megatron, ["--hf", str(good / "hf")]), (megatron_to_hf, ["--megatron", str(good / "m")])]
    usage = shutil.disk_usage(tmp_path)
    for i, (command, source) in enumerate(ways):
        out = str(tmp_path / f"out{i}")
        with monkeypatch.context() as patch:
            patch.setattr(workspace.shutil, "disk_usage", lambda path: usage._replace(free=1000))
            assert command([*source, "--out", out, *QUIET]) == 1
        assert "0.00 GB are free; make room and go on with --resume" in capsys.readouterr().err
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            assert command([*source, "--out", out, "--resume", *QUIET]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        error = capsys.readouterr().err
        assert "no room left to write" in error and "--resume" in error and not Path(out).exists()
        assert command([*source, "--out", out, "--resume", *QUIET]) == 0
        assert verify([out, str(good / "hf"), *QUIET]) == 0
