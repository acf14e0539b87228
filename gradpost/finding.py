"""The finding of a check, and how findings are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from ps_protocol.printable import printable

from .output import count

Level = Literal["ok", "skipped", "warning", "broken"]
_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "skipped": ("-", "dim"),
    "warning": ("warning", "yellow"),
    "broken": ("BROKEN", "bold red"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `advice` says what to do, `why` what happens otherwise."""

    check: str
    level: Level
    detail: str
    advice: str = ""
    why: str = ""


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each finding with its reason and advice, and a verdict."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        line = Text.assemble((f"{mark:8}", style), f"{finding.check:{width}}  ", printable(finding.detail))
        console.print(line)
        if finding.why:
            console.print(Text.assemble(" " * (8 + width + 2), printable(finding.why)))
        if finding.advice:
            console.print(Text.assemble(" " * (8 + width + 2), ("-> " + printable(finding.advice), "bold")))
    broken = sum(finding.level == "broken" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    verdict = "all is well" if not broken else f"{count(broken, 'check')} failed"
    console.print()
    console.print(verdict + (f", with {count(warnings, 'warning')}" if warnings else ""))
