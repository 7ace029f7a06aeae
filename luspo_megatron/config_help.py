"""`luspo config`: the resolved configuration with the source of each value, what differs between two, and the schema.

What is printed is YAML that `--config` reads back to the same configuration. The schema (JSON Schema, draft 2020-12) is
for editors: it completes keys, shows the help and marks mistakes while a recipe is written. Left out: the checks across
fields, which `luspo train` and `luspo plan` make.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import yaml

from luspo_megatron.config_io import canonical_flags, field_types, flag_names, load_config, split_config_files
from luspo_megatron.config_yaml import flatten_file
from luspo_megatron.errors import UserError

DEFAULT, COMMAND_LINE = "default", "command line"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def sources(cls: type, argv: Sequence[str]) -> dict[str, str]:
    """{"section.name": file, "command line" or "default"}; the last one that names a value wins, as in load_config."""
    types = field_types(cls)
    tuples = {name for name, hint in types.items() if get_origin(hint) is tuple}
    out = dict.fromkeys(types, DEFAULT)
    files, flags = split_config_files(argv)
    for path in files:
        out |= dict.fromkeys(flatten_file(path, types, tuples), path)
    return out | dict.fromkeys(flag_names(canonical_flags(flags, types), types), COMMAND_LINE)


def show(config: Any, origin: dict[str, str]) -> str:
    """YAML with the source of each value behind it; values that somebody set are marked."""
    lines: list[tuple[str, str]] = []
    _lines(config, "", origin, lines)
    width = max((len(text) for text, source in lines if source and len(text) <= 60), default=0)
    return "\n".join(f"{text:<{width}}  # {source}" if source else text for text, source in lines)


def _lines(config: Any, prefix: str, origin: dict[str, str], out: list[tuple[str, str]]) -> None:
    indent = "  " * prefix.count(".")
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), prefix + item.name
        if dataclasses.is_dataclass(value):
            out.append((f"{indent}{item.name}:", ""))
            _lines(value, f"{name}.", origin, out)
        else:
            mark = origin[name] if origin[name] == DEFAULT else f"<- {origin[name]}"
            out.append((f"{indent}{item.name}: {_scalar(value)}", mark))


def _scalar(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=2**20).removesuffix("\n").removesuffix("\n...")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"section.name": value} in the order of declaration."""
    out: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        out |= flat(value, f"{prefix}{item.name}.") if dataclasses.is_dataclass(value) else {prefix + item.name: value}
    return out


def difference(cls: type, first: str, second: str) -> str:
    """One line per setting that differs between two YAML files or run folders."""
    a, b = (flat(load_config(cls, ["--config", _file_of(path)])) for path in (first, second))
    lines = [(name, _scalar(a[name]), _scalar(b[name])) for name in a if a[name] != b[name]]
    width = max((len(name) for name, _, _ in lines), default=0)
    return "\n".join(f"{name:<{width}}  {old} -> {new}" for name, old, new in lines)


def _file_of(path: str) -> str:
    return str(Path(path) / "config.yaml") if Path(path).is_dir() else path


def schema(cls: type, title: str) -> dict[str, Any]:
    """JSON Schema of a configuration's YAML file. Every section and key is optional; unknown keys are mistakes."""
    return {"$schema": DRAFT, "title": title, **_object(cls)}


def schema_text(cls: type, title: str) -> str:
    return json.dumps(schema(cls, title), indent=1) + "\n"


def _object(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    described = {item.arg_name: item.description for item in docstring_parser.parse_from_object(cls).params}
    default: Any = cls()
    properties: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            properties[item.name] = {**_object(hint), "type": ["object", "null"]}  # type: ignore[arg-type]
            continue
        value = getattr(default, item.name)
        properties[item.name] = {**_type(hint), "default": list(value) if isinstance(value, tuple) else value}
        if described.get(item.name):
            properties[item.name]["description"] = " ".join(str(described[item.name]).split())
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _type(get_args(hint)[0])}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    if hint not in names:
        raise TypeError(f"no JSON Schema for {hint}")
    # a path such as 30 or a seed list written without quotes is still text to the loader
    return {"type": ["string", "number"]} if hint is str else {"type": names[hint]}


def main(argv: Sequence[str], configs: dict[str, type]) -> int:
    """`luspo config [COMMAND] [--schema | --diff A B | flags of COMMAND]`. Raises UserError."""
    words = list(argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "train"
    if command not in configs:
        raise UserError(f"luspo config {command!r}: takes the configuration of {', '.join(configs)}")
    cls = configs[command]
    if words[:1] == ["--schema"]:
        if words[1:]:
            raise UserError(f"luspo config --schema takes nothing more, not {words[1]!r}")
        print(schema_text(cls, f"luspo {command}"), end="")
    elif words[:1] == ["--diff"]:
        if len(words) != 3:
            raise UserError("luspo config --diff takes two YAML files or run folders, e.g. --diff runs/a runs/b")
        print(difference(cls, *words[1:]) or "equal")
    else:
        print(show(load_config(cls, words, prog=f"luspo config {command}"), sources(cls, words)))
    return 0
