"""The actor's shards -> a Hugging Face folder: sharded safetensors with an index; config and tokenizer are copied."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from luspo_megatron.errors import UserError
from luspo_megatron.ranks import Ranks
from luspo_megatron.weights.gather import ShardGatherer
from luspo_megatron.weights.plan import plan_sync
from luspo_megatron.weights.table import WeightTable

SHARD_BYTES = 4 * 2**30
# config and tokenizer files; weights and anything else of the source folder stay behind
CARRIED = ("config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
           "added_tokens.json", "chat_template*")


def export_hf(gpt: Any, table: WeightTable, ranks: Ranks, *, source_folder: str | Path, out: str | Path, dtype: str,
              shard_bytes: int = SHARD_BYTES) -> None:
    """Writes to `out`, which must not be there or be empty, and is complete or as it was.

    Each source rank writes the tensors that it gathers.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    if ranks.rank == 0:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out}: is there already and not an empty folder; choose another one or remove it")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.broadcast(None)
    element = getattr(torch, dtype)
    plan = plan_sync(table, ranks.layout, dtype, shard_bytes)
    gatherer = ShardGatherer(gpt, table, ranks)
    numbers = {id(unit): i for i, unit in enumerate(plan.units)}
    weight_map: dict[str, str] = {}
    for unit, tensors in gatherer.walk(plan, element):
        if tensors is not None:
            name = f"model-{numbers[id(unit)] + 1:05d}-of-{len(plan.units):05d}.safetensors"
            save_file({k: v.contiguous().cpu().clone() for k, v in tensors.items()}, partial / name,
                      metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, name))
    every = [ranks.broadcast(weight_map, source) for source in range(ranks.layout.world_size)]
    if ranks.rank == 0:
        _finish(partial, out, table, {k: v for part in every for k, v in part.items()}, Path(source_folder), dtype)
    ranks.broadcast(None)


def _finish(partial: Path, out: Path, table: WeightTable, weight_map: dict[str, str], source: Path, dtype: str) -> None:
    if set(weight_map) != set(table.hf_shapes):
        raise RuntimeError(f"export wrote {len(weight_map)} tensors, the model has {len(table.hf_shapes)}")
    size = sum(os.path.getsize(partial / name) for name in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for pattern in CARRIED:
        for file in source.glob(pattern):
            shutil.copy2(file, partial / file.name)
    config = json.loads((partial / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    os.rename(partial, out)
