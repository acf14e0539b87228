"""What a service takes at once, as numbers; `overload.py` enforces it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How many requests at once, those that wait included, and how long a body may stand still."""

    max_requests: int = 2048
    body_timeout_seconds: float = 30.0
