"""Text of other processes, made safe for terminals and logs."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any


def printable(text: str) -> str:
    r"""Escape characters that would break a line or control the terminal; the name of a parameter may have any.

    >>> print(printable("naïve \x1b[31m\n"))
    naïve \x1b[31m\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_event(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    r"""Escape every text of a log entry: a processor of structlog for renderers that do not.

    >>> escape_event(None, "info", {"event": "trainer 1 failed:\nforged", "round": 3})
    {'event': 'trainer 1 failed:\\nforged', 'round': 3}
    """
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}
