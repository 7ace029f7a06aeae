"""YAML files of settings as flat ``{"section.name": [values]}``, with every mistake named by file and key.

Scalars stay the text that was written; types are the business of config_io.py. Duplicate keys, which YAML readers
usually drop in silence, are errors.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

import yaml

from luspo_megatron.errors import UserError


class _TextLoader(yaml.BaseLoader):
    """Every scalar is text; a key written twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def flatten_file(path: str, known: Collection[str], tuples: Collection[str]) -> dict[str, list[str]]:
    """Read one file. ``known`` are the leaves there are, ``tuples`` those that take a list.

    Raises UserError that lists every mistake of the file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_TextLoader)  # noqa: S506 - a subclass of BaseLoader builds text only
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: is not UTF-8 text; give a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: is not valid YAML: {_one_line(error)}") from None
    if tree in (None, ""):
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"--config {path}: holds no mapping; write lines such as optimizer: {{lr: 1e-6}}")
    out: dict[str, list[str]] = {}
    problems: list[str] = []
    _flatten(tree, "", known, tuples, out, problems)
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return out


def _flatten(
    tree: dict[Any, Any],
    prefix: str,
    known: Collection[str],
    tuples: Collection[str],
    out: dict[str, list[str]],
    problems: list[str],
) -> None:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        is_section = any(name.startswith(f"{path}.") for name in known)
        if is_section and isinstance(value, dict):
            _flatten(value, f"{path}.", known, tuples, out, problems)
        elif is_section and value == "":
            continue  # a section whose lines are all commented out
        elif is_section:
            problems.append(f"{path} is a section; write its settings indented below it")
        elif path not in known:
            problems.append(f"unknown key {path}{suggestion(path, known)}")
        elif path in out:
            problems.append(f"{path} is given twice")
        elif isinstance(value, dict):
            problems.append(f"{path} takes one value, not a mapping; quote it if it is meant as text")
        elif isinstance(value, list) and (path not in tuples or not all(isinstance(item, str) for item in value)):
            expected = "a list of plain values" if path in tuples else "one value, not a list"
            problems.append(f"{path} takes {expected}; quote it if it is meant as text")
        else:
            out[path] = value if isinstance(value, list) else [value]


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean X?"`` for a name that resembles a known one, else empty.

    A right last part under a wrong section counts most (``lr`` for ``optimizer.lr``), then the likeness of the whole.
    """
    names = list(known)
    leaf = name.rpartition(".")[2]
    near = [item for item in names if item.rpartition(".")[2] == leaf]
    sections = sorted({item.rpartition(".")[0] for item in names if "." in item})
    near = near or difflib.get_close_matches(name, names + sections, n=1, cutoff=0.7)
    if not near:
        close = difflib.get_close_matches(leaf, [item.rpartition(".")[2] for item in names], n=1, cutoff=0.75)
        near = [item for item in names if item.rpartition(".")[2] in close]
    return f"; did you mean {' or '.join(prefix + item for item in near[:3])}?" if near else ""


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return f"{getattr(error, 'problem', None) or 'unreadable'}{place}"
