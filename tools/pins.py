"""Print constraints.txt: the exact version of everything that setup.py's requirements bring, as installed here.

Run it in the environment whose tests pass: ``.venv/bin/python tools/pins.py > constraints.txt``. Only the closure of the
requirements and of the extras ``dev`` and ``demo`` is listed; other packages of the environment are left out. The
engines and Transformer Engine are not pinned: they live in environments of their own.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from unittest import mock

import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("dev", "demo")
HEAD = """\
# The versions that the tests pass with (Python {python}, Linux x86-64). Ranges are in setup.py.
# Made by tools/pins.py.
"""


def requirements() -> list[str]:
    """install_requires and the extras of setup.py."""
    with mock.patch.object(setuptools, "setup") as setup:
        path = Path(__file__).resolve().parent.parent / "setup.py"
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__file__": str(path), "__name__": "setup"})
    asked = setup.call_args.kwargs
    return [*asked["install_requires"], *(line for extra in EXTRAS for line in asked["extras_require"][extra])]


def closure(lines: list[str]) -> dict[str, str]:
    """{name: version} of the requirements and of all that they need on this platform."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(line), "") for line in lines]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *sorted(requirement.extras)):
            name = canonicalize_name(requirement.name)
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            found = distribution(name)
            pins[name] = re.sub(r"\+.*", "", found.version)  # a local build (+cpu, +cu130) of the same version will do
            todo += [(Requirement(line), wanted) for line in found.requires or []]
    return pins


if __name__ == "__main__":
    try:
        found = closure(requirements())
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed here; run make setup first")
    print(HEAD.format(python=".".join(map(str, sys.version_info[:2]))), end="")
    print(*(f"{name}=={version}" for name, version in sorted(found.items())), sep="\n")
