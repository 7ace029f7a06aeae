"""The frame of every HTML page: one file, styles inside, nothing loaded from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape

from luspo_megatron.report.page_style import STYLE


def page(title: str, parts: Iterable[str], script: str = "") -> str:
    """The page as text. ``title`` is escaped here, ``parts`` are HTML; ``script`` (only the live view has one) too."""
    footer = f"<footer>Written {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by luspo_megatron.</footer>"
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
            + "\n".join(part for part in (*parts, footer) if part) + f"\n</main>{script}</body></html>\n")


def tile(title: str, value: str, small: str = "", kind: str = "") -> str:
    """One number of the row at the top of a page, as HTML."""
    extra = f"<small>{escape(small)}</small>" if small else ""
    return f'<div class="tile"><dt>{escape(title)}</dt><dd><b class="{kind}">{escape(value)}</b>{extra}</dd></div>'


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers_from: int = 1) -> str:
    """A table of text in a card that scrolls sideways where it must; columns from ``numbers_from`` on are numbers."""

    def cells(tag: str, values: Iterable[str]) -> str:
        return "".join(f'<{tag}{" class=number" if index >= numbers_from else ""}>{escape(value)}</{tag}>'
                       for index, value in enumerate(values))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="card"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'
