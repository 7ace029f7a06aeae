"""Torch stand-in for SGLang's compiled kernels (see the package above). Imported by SGLang under this name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

__version__ = "0.4.10"  # SGLang checks for a least version
__path__ = []  # type: ignore[var-annotated, no-redef]


def assign_req_to_token_pool_cpu(req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any,
                                 *_: Any, **__: Any) -> None:
    """Row ``req_pool_indices[i]``, columns [start[i], end[i]): the next entries of ``out_cache_loc``."""
    used = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):  # noqa: B905
        req_to_token[row, first:last] = out_cache_loc[used : used + last - first].to(req_to_token.dtype)
        used += last - first


_MASK = 0xFFFFFFFF


def _mix(h: Any, k: Any) -> Any:
    k = k * 0xCC9E2D51 & _MASK
    k = (k << 15 | k >> 17) & _MASK
    h = h ^ (k * 0x1B873593 & _MASK)
    h = (h << 13 | h >> 19) & _MASK
    return h * 5 + 0xE6546B64 & _MASK


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column), 32 bits in int64 [n, m], as SGLang's Triton kernel: it turns the seed of
    a request into the noise of each token. int64 wraps around, which leaves the low 32 bits of a product right."""
    seed = seed.to(torch.int64)[:, None]
    h = _mix(torch.zeros_like(seed), seed & _MASK)
    h = _mix(h, seed >> 32 & _MASK)
    h = _mix(h, positions.to(torch.int64)[:, None] & _MASK)
    h = _mix(h, col_indices.to(torch.int64)[None] & _MASK) ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


_ops = torch.library.Library("sgl_kernel", "FRAGMENT")
_ops.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_ops.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def _missing(name: str) -> Any:
    def kernel(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} has no CPU stand-in")

    kernel.__name__ = name
    return kernel


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


class _Names:
    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Submodule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "scalar_types":
            return _Names()
        if name == "ScalarType":
            return type(name, (), {})
        return _missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any ``sgl_kernel.x`` can be imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) \
            if fullname.startswith("sgl_kernel.") else None

    def create_module(self, spec: Any) -> Any:
        return _Submodule(spec.name)

    def exec_module(self, module: Any) -> None:
        return None


sys.meta_path.insert(0, _Finder())

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
                "Tensor? correction_bias=None) -> (Tensor, Tensor)")


def _topk_softmax(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool, correction_bias: Any = None
                  ) -> tuple[Any, Any]:
    """Router: (weights float32 [T, topk], expert ids int32 [T, topk]) of logits [T, E]."""
    probabilities = torch.softmax(gating_output.float(), dim=-1)
    scores = probabilities if correction_bias is None else probabilities + correction_bias
    ids = torch.topk(scores, topk, dim=-1).indices
    weights = probabilities.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.to(torch.int32)


_library.impl("topk_softmax_cpu", _topk_softmax, "CPU")
