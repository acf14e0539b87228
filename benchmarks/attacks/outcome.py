"""What an attack did and what was done about it, counted by the attacker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """`sent` counts whatever the attack sends many of; `answers` what came back: GOAWAY, RST_STREAM, statuses, ends."""

    sent: int = 0
    connections: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, object]:
        return {"sent": self.sent, "connections": self.connections, "answers": dict(self.answers)}

    def __str__(self) -> str:
        heard = ", ".join(f"{what} ×{count}" for what, count in self.answers.most_common(4)) or "nothing was said"
        return f"{self.sent} sent over {self.connections} connections; {heard}"


def paced(seconds: float, per_second: float) -> Iterator[int]:
    """Count up so many times a second, until the time is over."""
    begin = time.monotonic()
    number = 0
    while (now := time.monotonic()) < begin + seconds:
        while number < (now - begin) * per_second:
            yield number
            number += 1
        time.sleep(0.005)
