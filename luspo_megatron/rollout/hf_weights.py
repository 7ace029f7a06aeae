"""Loading pushed weights into a Hugging Face model: on-disk tensor names -> stretches of the module's parameters.

Checkpoints name one tensor per expert; transformers holds all experts of a layer in one parameter and describes the
conversion itself. The map here is derived from that description: each parameter is replaced by the numbers of its own
elements, run through the conversion that ``save_pretrained`` would apply, and what comes out says where every
on-disk tensor lives. So no family's names are written down here. Every element is loaded exactly once in a push, or
the push is refused before a byte of it is used.

Left out: conversions that interleave elements (a tensor must be one contiguous stretch of a parameter; all Qwen
families are), and quantized models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.weights.manifest import Bucket, Manifest


@dataclass(frozen=True)
class Location:
    """An on-disk tensor: elements [start, start + numel) of the flattened ``parameter``."""

    parameter: Tensor
    start: int
    shape: tuple[int, ...]


def on_disk_locations(model: Any) -> dict[str, Location]:
    """On-disk name -> where it lives. Tied parameters appear once, under their first name (no lm_head)."""
    from transformers.core_model_loading import revert_weight_conversion

    locations: dict[str, Location] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise UserError(f"{type(model).__name__}: parameter {name} is not contiguous; the embedded engine cannot "
                            "load weights into it, use another engine")
        numbers = torch.arange(parameter.numel(), dtype=torch.int64).view(parameter.shape)
        found = revert_weight_conversion(model, {name: numbers})
        covered = 0
        for disk_name, elements in found.items():
            start = int(elements.flatten()[0])
            if not torch.equal(elements.flatten(), torch.arange(start, start + elements.numel())):
                raise UserError(f"{type(model).__name__}: the checkpoint tensor {disk_name} is not one stretch of the "
                                f"parameter {name}; the embedded engine does not know this model family, use another")
            locations[disk_name] = Location(parameter.data, start, tuple(elements.shape))
            covered += elements.numel()
        if covered != parameter.numel():
            raise UserError(f"{type(model).__name__}: {covered} of {parameter.numel()} elements of {name} have a "
                            "checkpoint name; the embedded engine does not know this model family, use another")
    return locations


def check_manifest(manifest: Manifest, locations: Mapping[str, Location]) -> None:
    """Raise RunError naming every key that is missing, extra, of another shape, or covered other than once."""
    problems = manifest.violations()
    shapes = {piece.name: piece.shape for bucket in manifest.buckets for piece in bucket.slices}
    if missing := sorted(locations.keys() - shapes.keys()):
        problems.append(f"missing: {', '.join(missing)}")
    if extra := sorted(shapes.keys() - locations.keys()):
        problems.append(f"not in the model: {', '.join(extra)}")
    problems += [f"{name}: sent with shape {list(shape)}, the model has {list(locations[name].shape)}"
                 for name, shape in shapes.items() if name in locations and locations[name].shape != shape]
    if problems:
        raise RunError(f"weight push {manifest.version} does not fit the engine's model: {'; '.join(problems)}")


def _bytes_hash(values: Tensor) -> bytes:
    return xxhash.xxh3_64_digest(values.contiguous().view(torch.uint8).cpu().numpy())


def checksums(locations: Mapping[str, Location]) -> dict[str, str]:
    """xxh3_64 of every tensor as it lies in the model, hexadecimal, by on-disk name."""
    return {name: _bytes_hash(where.parameter.view(-1)[where.start : where.start + prod(where.shape)]).hex()
            for name, where in locations.items()}


@dataclass
class Loader:
    """Copies the buckets of one push into the parameters; with ``verify`` it remembers the hash of what it wrote."""

    locations: Mapping[str, Location]
    verify_after: bool = True
    _written: list[tuple[str, Tensor, bytes]] = field(default_factory=list)

    @torch.no_grad()
    def load(self, bucket: Bucket, buffer: Tensor) -> None:
        """``buffer`` uint8 [bucket.nbytes], free for reuse afterwards. Converts to the parameter's dtype."""
        for piece in bucket.slices:
            raw = buffer[piece.offset : piece.offset + piece.nbytes]
            dtype: torch.dtype = getattr(torch, piece.dtype)
            if piece.offset % dtype.itemsize:
                raw = raw.clone()  # a view needs aligned bytes
            location = self.locations[piece.name]
            values = raw.view(dtype).to(location.parameter.dtype)
            start = location.start + piece.start
            target = location.parameter.view(-1)[start : start + piece.numel]
            target.copy_(values)
            if self.verify_after:
                self._written.append((str(piece), target, _bytes_hash(values)))

    def verify(self) -> None:
        """Read every loaded stretch back from the module; raise RunError naming those that are not what was sent."""
        wrong = [name for name, target, expected in self._written if _bytes_hash(target) != expected]
        if wrong:
            raise RunError(f"after the load these tensors do not hold what was sent: {', '.join(wrong)}")
