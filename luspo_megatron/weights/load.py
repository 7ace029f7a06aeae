"""Hugging Face safetensors -> the local Megatron shard, through the weight table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from luspo_megatron.errors import UserError
from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.table import Entry, WeightTable


class HfCheckpoint:
    """A folder of safetensors, with or without an index. Tensors are read one at a time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        files = sorted(self.folder.glob("*.safetensors"))
        if index.is_file():
            named = self._files_of(index)
            missing = sorted(name for name in named if not (self.folder / name).is_file())
            if missing:
                raise UserError(f"{self.folder}: files named by the index are missing: {', '.join(missing[:5])}")
            files = sorted(self.folder / name for name in named)
        if not files:
            raise UserError(f"{self.folder}: no .safetensors files; convert the model to safetensors first")
        self._handles: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file}: cannot be read as safetensors ({error}); copy the file again") from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    @staticmethod
    def _files_of(index: Path) -> set[str]:
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{index}: is not valid JSON ({error}); copy the file again") from None
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index}: has no weight_map of file names; copy the file again")
        return set(weight_map.values())

    @property
    def names(self) -> set[str]:
        return set(self._handles)

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[name].get_tensor(name)  # type: ignore[no-any-return]

    def check(self, table: WeightTable) -> None:
        """UserError unless the folder holds exactly the model's tensors with their shapes.

        A tied head written all the same is accepted, and so are rotary buffers of old checkpoints.
        """
        want, have = table.hf_shapes, self.names
        extra = {n for n in have - set(want) if not n.endswith("rotary_emb.inv_freq")}
        if table.arch.tied:
            extra.discard("lm_head.weight")
        wrong = [f"{name} {shape} instead of {want[name]}" for name in sorted(set(want) & have)
                 if (shape := tuple(self._handles[name].get_slice(name).get_shape())) != want[name]]
        problems = [f"{title}: {', '.join(items[:5])}{f' and {len(items) - 5} more' if len(items) > 5 else ''}"
                    for title, items in (("missing", sorted(set(want) - have)), ("unexpected", sorted(extra)),
                                         ("wrong shape", wrong)) if items]
        if problems:
            raise UserError(f"{self.folder}: tensors do not fit its config.json; " + "; ".join(problems))


def local_parameters(gpt: Any, table: WeightTable, layout: ParallelLayout, rank: int) -> Iterator[tuple[Entry, Tensor]]:
    """(global entry, local shard) of every parameter of the unwrapped GPTModel of this rank."""
    layer_offset = layout.dense_coordinate(rank)["pp"] * (table.arch.num_layers // layout.pp)
    local_experts = table.arch.num_experts // layout.ep
    expert_offset = layout.expert_coordinate(rank)["ep"] * local_experts
    for name, parameter in gpt.named_parameters():
        yield table.find(name, layer_offset=layer_offset, expert_offset=expert_offset), parameter


@torch.no_grad()
def load_hf(gpt: Any, folder: str | Path, table: WeightTable, layout: ParallelLayout, rank: int) -> None:
    """Fills every parameter of the local shard; each is checked for its shape."""
    checkpoint = HfCheckpoint(folder)
    checkpoint.check(table)
    for entry, parameter in local_parameters(gpt, table, layout, rank):
        size, shard = shard_of(entry, layout, rank)
        value = entry.row.layout.split([checkpoint[name] for name in entry.hf_names], size, shard)
        if value.shape != parameter.shape:
            raise RuntimeError(f"{entry.megatron}: shard {tuple(value.shape)}, parameter {tuple(parameter.shape)}")
        parameter.copy_(value)


def shard_of(entry: Entry, layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """(tensor-parallel size, this rank's part) for an entry: experts are cut over ETP, all else over TP."""
    if entry.row.per_expert:
        return layout.etp, layout.expert_coordinate(rank)["etp"]
    return layout.tp, layout.dense_coordinate(rank)["tp"]
