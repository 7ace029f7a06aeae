"""What both checkpoint formats share: dtypes by their names, reading bytes into tensors, hashes, kinds of failure."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from luspo_megatron.errors import RunError

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
                      "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(RunError):
    """A checkpoint that is not what it should be: the message names files and tensors. Exit code 1."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def pread(fd: int, nbytes: int, offset: int, path: Path) -> Tensor:
    """`nbytes` at `offset` as a new uint8 tensor. Not mapped: mapped pages would count as memory of the process."""
    out = torch.empty(nbytes, dtype=torch.uint8)
    view = raw(out) if nbytes else memoryview(b"")
    done = 0
    while done < nbytes:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {offset + done}, {nbytes - done} bytes too early; "
                                  "the file is truncated, copy it again")
        done += count
    return out


def pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def xxh3(data: bytes | memoryview) -> str:
    """xxh3_64 as 16 hexadecimal digits, the form that manifests hold."""
    return xxhash.xxh3_64_hexdigest(data)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable (fsync of the directory), where the file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Complete or absent, also after a crash: written aside, fsynced, renamed."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, path)


def listed(names: list[str], most: int = 8) -> str:
    """Names for an error message; the rest as a count."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
