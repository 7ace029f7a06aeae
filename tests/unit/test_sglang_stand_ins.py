"""The stand-ins that let SGLang run on a CPU (loaded as SGLang would, under the name sgl_kernel)."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
import torch

import luspo_megatron

FILE = Path(luspo_megatron.__file__).parent / "rollout/inside_engine/sglang_cpu/sgl_kernel/__init__.py"


@pytest.fixture(scope="module")
def kernels():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32, seed 0, from its published description; whole 4-byte blocks only."""
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 % 2**32
        k = (k * 2**15 % 2**32) + k // 2**17
        h ^= k * 0x1B873593 % 2**32
        h = (h * 2**13 % 2**32) + h // 2**19
        h = (h * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h // 2**shift) * factor % 2**32
    return h


def test_the_reference_is_murmur3() -> None:
    assert murmur3(b"test") == 0xBA6BD213 and murmur3(b"\0\0\0\0") == 0x2362F9DE  # published test vectors


def test_the_noise_of_a_seed_is_murmur3_of_seed_position_and_column(kernels) -> None:  # type: ignore[no-untyped-def]
    seeds = [0, 1, 2**31 - 1, 2**40 + 17]
    positions = [0, 5, 4095, 2**31 - 1]
    columns = [0, 1, 151_935]
    found = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    want = [[murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
            for seed, position in zip(seeds, positions, strict=True)]
    assert found.tolist() == want
