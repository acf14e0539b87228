"""What the documents have from the code: `make reference` writes it into them, test_reference.py holds it there."""

from __future__ import annotations

from collections.abc import Callable

from . import cli, metrics, protocol, settings

# Each returns the text of its document with these parts as they are in the code.
DOCUMENTS: dict[str, Callable[[str], str]] = {
    "cli.md": cli.renew,
    "metrics.md": metrics.renew,
    "protocol-reference.md": protocol.renew,
    "settings.md": settings.renew,
}
