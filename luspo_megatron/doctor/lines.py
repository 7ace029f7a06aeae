"""One finding of the doctor, and how it looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from luspo_megatron.errors import RunError, UserError

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Line:
    """``mend``: what to do about it; empty where there is nothing to do."""

    level: Level
    name: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8}{self.name:<22}{self.text}{f' - {self.mend}' if self.mend else ''}"


def ok(name: str, text: str) -> Line:
    return Line("ok", name, text)


def warning(name: str, text: str, mend: str) -> Line:
    return Line("warning", name, text, mend)


def error(name: str, text: str, mend: str) -> Line:
    return Line("error", name, text, mend)


def guarded(name: str, check: Callable[[], Iterable[Line]]) -> Iterator[Line]:
    """The lines of a check; one that cannot go on is an error line of its own, never the end of the doctor."""
    try:
        yield from check()
    except (UserError, RunError) as mistake:
        yield Line("error", name, str(mistake))
    except Exception as fault:  # noqa: BLE001 - a check that fails says something about what it looked at
        yield error(name, f"{type(fault).__name__}: {str(fault)[:300]}", "this check could not be made; see the text")
