"""Configuration dataclasses from the command line and from YAML files, and back to YAML.

A YAML file is a set of saved flags: ``optimizer: {lr: 1e-6}`` is ``--optimizer.lr 1e-6``. Files given by ``--config``
(as often as one likes) are read first, then the flags; the last one wins. Scalars in YAML are taken as they are
written (``on`` stays the word "on", ``1e-6`` needs no dot) and get their type from the dataclass, so a file and a flag
can never differ in meaning. tyro converts the values and writes the help; this module decides what is a flag, so that
a mistake becomes one message with a suggestion. Left out: environment variables, interpolation, includes, and tuples
of anything that starts with a dash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro
import yaml

from luspo_megatron.config_yaml import flatten_file, suggestion
from luspo_megatron.errors import UserError

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
FILES_HELP = """\
--config FILE.yaml (repeatable) reads settings from a YAML file, where
"optimizer: {lr: 1e-6}" stands for --optimizer.lr 1e-6. A flag wins over a
file, a later file over an earlier one. Switches also take true or false."""


def field_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a dataclass as ``{"section.name": type}``, in the order of declaration."""
    hints = get_type_hints(cls)
    out: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            out |= field_types(hint, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            out[prefix + item.name] = hint
    return out


def load_config[C](cls: type[C], argv: Sequence[str], prog: str = "luspo", description: str = "") -> C:
    """Build ``cls`` from its defaults, the ``--config`` files in ``argv``, then the other flags in ``argv``.

    Raises UserError (every unknown key or flag of a file or of the command line in one message) and, after printing
    the help for ``-h``/``--help``, SystemExit(0).
    """
    types = field_types(cls)
    files, flags = split_config_files(argv)
    config: C | None = None
    for path in files:
        config = _parse(cls, yaml_flags(path, types), prog, default=config, where=f"{path}: ")
    if any(flag in ("-h", "--help") for flag in flags):
        _show_help(cls, prog, description, config)
    return _parse(cls, canonical_flags(flags, types), prog, default=config, where="")


def save_config(config: Any, path: str | os.PathLike[str]) -> None:
    """Write a configuration as YAML that ``load_config`` reads back to an equal object. Replaces ``path`` at once."""
    # Not allow_unicode: PyYAML then writes some line breaks (U+0085) raw and reads them back as spaces.
    text = yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False, width=120)
    part = f"{os.fspath(path)}.part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)


def split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """``argv`` -> (values of --config, everything else)."""
    files, rest, tokens = [], [], list(argv)
    while tokens:
        token = tokens.pop(0)
        if token == "--config":
            if not tokens or tokens[0].startswith("--"):
                raise UserError("--config needs a YAML file after it, e.g. --config recipe.yaml")
            files.append(tokens.pop(0))
        elif token.startswith("--config="):
            files.append(token.removeprefix("--config="))
        else:
            rest.append(token)
    return files, rest


def split_words(argv: Sequence[str], types: dict[str, Any]) -> tuple[list[str], list[str]]:
    """``argv`` -> (words that belong to no flag, everything else), for commands that take things without a flag."""
    words, rest, tokens = [], [], list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-"):
            words.append(token)
            continue
        rest.append(token)
        hint = str if token == "--config" else types.get(token[2:].replace("-", "_"))
        if hint is bool and tokens and tokens[0].lower() not in TRUE_WORDS + FALSE_WORDS:
            continue
        rest += _values_after(tokens, hint)
    return words, rest


def yaml_flags(path: str, types: dict[str, Any]) -> list[str]:
    """A YAML file as flags in the spelling that tyro takes."""
    tuples = {name for name, hint in types.items() if _is_tuple(hint)}
    out, problems = [], []
    for name, value in flatten_file(path, types, tuples).items():
        try:
            out += _emit(name, types[name], value)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return out


def canonical_flags(argv: Sequence[str], types: dict[str, Any]) -> list[str]:
    """Flags as people write them -> flags in the spelling that tyro takes, checked for names and missing values.

    Dashes and underscores are the same in names; switches are ``--a.b``, ``--a.b true``, ``--a.no_b`` or ``--no_a.b``.
    """
    negatives = {_negative(name): name for name, hint in types.items() if hint is bool}
    negatives |= {f"no_{name}": name for name, hint in types.items() if hint is bool}
    out: list[str] = []
    problems: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--"):
            hint = f"; a file of settings is given as --config {token}" if token.endswith((".yaml", ".yml")) else ""
            problems.append(f"{token!r} belongs to no flag{hint}")
            continue
        written, equals, value = token[2:].partition("=")
        name = written.replace("-", "_")
        values = [value] if equals else _values_after(tokens, types.get(name))
        try:
            if name in types:
                out += _emit(name, types[name], values)
            elif name in negatives and not equals:
                out.append(f"--{_negative(negatives[name])}")
            elif name in negatives:
                problems.append(f"--{written} takes no value; write --{negatives[name]}={value}")
            else:
                del tokens[: len(_values_after(list(tokens), tuple[str, ...]))]  # its values are no separate mistake
                problems.append(f"unknown flag --{written}{suggestion(name, list(types), prefix='--')}")
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return out


def flag_names(flags: Sequence[str], types: dict[str, Any]) -> list[str]:
    """The settings that canonical flags are about."""
    negatives = {_negative(name): name for name in types}
    written = [flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")]
    return [negatives.get(name, name) for name in written]


def _values_after(tokens: list[str], hint: Any) -> list[str]:
    """Take from ``tokens`` the values that belong to a flag of this type."""
    if hint is bool:
        count = 1 if tokens and not tokens[0].startswith("--") else 0
    elif hint is None:
        count = 0
    else:
        ends = [i for i, token in enumerate(tokens) if token.startswith("--")]
        count = min(ends, default=len(tokens))
        count = count if _is_tuple(hint) else min(count, 1)
    taken = tokens[:count]
    del tokens[:count]
    return taken


def _emit(name: str, hint: Any, values: list[str]) -> list[str]:
    if hint is bool:
        word = values[0].lower() if values else "true"
        if word not in TRUE_WORDS + FALSE_WORDS:
            raise UserError(f"--{name} is a switch and takes true or false, not {values[0]!r}")
        return [f"--{name}" if word in TRUE_WORDS else f"--{_negative(name)}"]
    if _is_tuple(hint):
        values = [] if values == [""] else values
        dashed = [value for value in values if value.startswith("-")]
        if dashed:
            raise UserError(f"--{name}: a value of a list cannot start with a dash: {dashed[0]!r}")
        return [f"--{name}", *values]
    if not values:
        raise UserError(f"--{name} needs a value")
    value = _number(values[0]) if hint is float else values[0]
    _check_value(name, hint, value)
    return [f"--{name}={value}"]


def _check_value(name: str, hint: Any, value: str) -> None:
    if get_origin(hint) is Literal and value not in get_args(hint):
        choices = ", ".join(repr(choice) if choice == "" else choice for choice in get_args(hint))
        raise UserError(f"--{name} takes one of {choices}; not {value!r}")
    if hint in (int, float):
        try:
            hint(value)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise UserError(f"--{name} takes {kind}, not {value!r}") from None


def _negative(name: str) -> str:
    section, dot, leaf = name.rpartition(".")
    return f"{section}{dot}no_{leaf}"


def _number(text: str) -> str:
    """YAML's own spelling of infinity and not-a-number -> Python's."""
    return re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text, flags=re.IGNORECASE)


def _is_tuple(hint: Any) -> bool:
    return get_origin(hint) is tuple


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _parse[C](cls: type[C], flags: list[str], prog: str, default: C | None, where: str) -> C:
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            start = cls() if default is None else default
            return tyro.cli(cls, args=flags, prog=prog, default=start, use_underscores=True)
    except SystemExit:
        raise UserError(where + _unboxed(shown.getvalue(), prog)) from None


def _show_help(cls: type, prog: str, description: str, default: Any) -> None:
    text = f"{description or cls.__doc__}\n\n{FILES_HELP}"
    tyro.cli(cls, args=["--help"], prog=prog, default=default, use_underscores=True, description=text)


def _unboxed(text: str, prog: str) -> str:
    """tyro's error box as plain lines: the mistake and the flag, without the pointer to the help."""
    lines = [line.strip("│| ") for line in text.splitlines() if not re.match(r"^[╭╰+]", line)]
    noise = ("For full helptext", "Argument helptext")
    lines = [line for line in lines if line.strip("─- ") and not line.startswith(noise)]
    return "\n  ".join([*lines, f"(see {prog} --help)"])
