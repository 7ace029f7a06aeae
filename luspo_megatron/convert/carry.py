"""Config, generation config and tokenizer: carried along with the weights, and checked against them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from luspo_megatron.convert.tensors import CheckpointError, listed
from luspo_megatron.weights.architecture import Architecture

CARRIED = ("config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
           "added_tokens.json", "chat_template*", "LICENSE*")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def carried_files(folder: Path) -> list[Path]:
    return sorted({file for pattern in CARRIED for file in folder.glob(pattern) if file.is_file()})


def check_companions(folder: Path, arch: Architecture) -> list[str]:
    """Warnings. CheckpointError where the tokenizer or the generation config has ids that the embedding lacks."""
    warnings = []
    largest = _largest_token_id(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        warnings.append(f"{folder}: no tokenizer files; the result will have none")
    elif largest is not None and largest >= arch.vocab_size:
        raise CheckpointError(f"{folder}: the tokenizer has id {largest}, the embedding only {arch.vocab_size} rows "
                              "(vocab_size); tokenizer and weights are not of one model")
    path = folder / "generation_config.json"
    if path.is_file():
        config = _json(path)
        ids = [(key, i) for key in TOKEN_IDS for i in _as_list(config.get(key))]
        if bad := [f"{key}={i}" for key, i in ids if i >= arch.vocab_size]:
            raise CheckpointError(f"{path}: {listed(bad)} outside the {arch.vocab_size} rows of the embedding")
    else:
        warnings.append(f"{folder}: no generation_config.json; the result will have none")
    return warnings


def _largest_token_id(folder: Path) -> int | None:
    ids: list[int] = []
    if (path := folder / "tokenizer.json").is_file():
        data = _json(path)
        vocab = data.get("model", {}).get("vocab", {})
        ids += vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [token["id"] for token in data.get("added_tokens") or []]
    for name in ("vocab.json", "added_tokens.json"):
        if (path := folder / name).is_file():
            ids += _json(path).values()
    return max(ids, default=None)


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); copy the file again") from error


def stated_dtypes(folder: Path) -> dict[str, str]:
    """What config.json says of the weights' dtype, by key (transformers 5: dtype, 4: torch_dtype)."""
    config = _json(folder / "config.json")
    return {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}


def carry(source: Path, out: Path, dtype: str, *, must_say: bool) -> list[str]:
    """Copies the files, and returns their names. The config.json of the copy states the `dtype` that the weights have:
    wherever the original states one, and with `must_say` in any case."""
    names = []
    for file in carried_files(source):
        shutil.copyfile(file, out / file.name)
        names.append(file.name)
    stated = stated_dtypes(out)
    keys = list(stated) or (["dtype"] if must_say else [])
    if any(stated.get(key) != dtype for key in keys):
        config = _json(out / "config.json") | dict.fromkeys(keys, dtype)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return names
