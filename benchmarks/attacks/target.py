"""The target of an attack, and its outcome as the attacker counts it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Self


@dataclass(frozen=True)
class Target:
    """A pserver, and the facts about it that are public. Sent to the attacker's process as JSON."""

    address: str
    coordinator: str
    path: str  # of a request that costs little
    large_path: str  # of a request with a large response
    send_path: str
    fence: dict[str, str]  # of a trainer whose push would be accepted

    def push_headers(self, num_bytes: int) -> dict[str, str]:
        return {**self.fence, "content-length": str(num_bytes)}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Target:
        return cls(**json.loads(text))


@dataclass
class Outcome:
    """The number of frames or requests sent, and the answers: GOAWAY, RST_STREAM, statuses, closed connections."""

    sent: int = 0
    connections: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, object]:
        return {"sent": self.sent, "connections": self.connections, "answers": dict(self.answers)}

    @classmethod
    def from_json(cls, members: dict[str, object]) -> Self:
        return cls(members["sent"], members["connections"], Counter(members["answers"]))  # type: ignore[arg-type]

    def describe(self) -> str:
        answers = ", ".join(f"{what} ×{count}" for what, count in self.answers.most_common(5)) or "served"
        return f"{self.sent} sent over {self.connections} connections: {answers}"


def paced(seconds: float, per_second: float) -> Iterator[int]:
    """Count up so many times a second, until the time is over."""
    begin = time.monotonic()
    number = 0
    while (now := time.monotonic()) < begin + seconds:
        while number < (now - begin) * per_second:
            yield number
            number += 1
        time.sleep(0.005)
