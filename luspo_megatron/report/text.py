"""Text of models and data sets made safe to show, and durations as people say them."""

from __future__ import annotations

import unicodedata


def visible(text: object, *, lines: bool = True) -> str:
    """``text`` with control characters spelled out (a response may hold escape sequences or half a character).

    Newlines and tabs stay where ``lines`` is True and are spelled out otherwise.
    """
    out = []
    for char in str(text):
        if lines and char in "\n\t":
            out.append(char)
        elif unicodedata.category(char) in ("Cc", "Cs") or char in _DIRECTION:
            out.append({"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char) or _escape(char))
        else:
            out.append(char)
    return "".join(out)


# Direction marks reorder the text around them, which would let a response rewrite what stands beside it.
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters: the head and the tail (an answer stands at the end), with a count between."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    head = limit - tail
    return f"{text[:head]} [... {len(text) - head - tail} characters ...] {text[-tail:]}"


def duration(seconds: float | None) -> str:
    """12.3 s, 4 min 05 s, 3 h 07 min; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
