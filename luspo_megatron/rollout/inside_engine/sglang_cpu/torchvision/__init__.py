"""Stand-in for torchvision (see the package above): a text-only server imports names from it and uses none."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0"
__path__ = []  # type: ignore[var-annotated, no-redef]
_INTERPOLATION = {"NEAREST": 0, "LANCZOS": 1, "BILINEAR": 2, "BICUBIC": 3, "BOX": 4, "HAMMING": 5, "NEAREST_EXACT": 6}


class _Submodule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        placeholder = type(name, (), dict(_INTERPOLATION))
        setattr(self, name, placeholder)
        return placeholder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) \
            if fullname.startswith("torchvision.") else None

    def create_module(self, spec: Any) -> Any:
        return _Submodule(spec.name)

    def exec_module(self, module: Any) -> None:
        return None


sys.meta_path.insert(0, _Finder())

from . import io, ops, transforms  # type: ignore[attr-defined]  # noqa: E402, F401
