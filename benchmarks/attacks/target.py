"""What an attacker knows: where a pserver is, and all that its public endpoints tell."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Target:
    """Travels to the attacker's process as JSON."""

    address: str
    coordinator: str
    path: str  # a request that costs little
    large_path: str  # one with a large reply
    send_path: str
    fence: dict[str, str]  # of a trainer whose push would be let in

    def push_headers(self, num_bytes: int) -> dict[str, str]:
        return {**self.fence, "content-length": str(num_bytes)}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Target:
        return cls(**json.loads(text))
