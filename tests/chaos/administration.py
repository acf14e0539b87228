"""An administrator of a history, whose requests have an allowed answer within a time limit."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx

from ps_protocol.routes import CHECKPOINTS

if TYPE_CHECKING:
    from .episode import Episode

QUIET_SECONDS = 10.0  # for an answer while nothing else is disturbed
CHANGE_SECONDS = 45.0  # otherwise: the coordinator's own 30 s, a pause of it, and a busy machine
CHECKPOINT_SECONDS = 120.0  # for a checkpoint while the coordinator is restarted, or places are disturbed
PATIENCE_SECONDS = 120.0  # for a request that is sent again
PAUSE_SECONDS = 0.2
ALLOWED = (200, 404, 409, 503)


def ask(episode: Episode, method: str, path: str, message: Any = None, *, seconds: float = CHANGE_SECONDS) -> int:
    """Send a request to the coordinator, check its answer, and return the status; 0 if the coordinator has died."""
    began = time.monotonic()
    try:
        with httpx.Client(base_url=episode.cluster.address, timeout=seconds, trust_env=False) as client:
            response = client.request(method, path, json=message)
    except httpx.TimeoutException:
        episode.complain(f"{method} {path} was not answered within {seconds:g} s")
        return 0
    except httpx.TransportError as error:
        episode.note(f"{method} {path}: {error!r}")
        return 0
    took = time.monotonic() - began
    episode.note(f"{method} {path} {message or ''}: {response.status_code} after {took:.2f} s: {response.text}")
    if response.status_code not in ALLOWED:
        episode.complain(f"{method} {path} was answered {response.status_code}: {response.text}")
    elif took > QUIET_SECONDS and episode.is_quiet(began, "administrator"):
        episode.complain(f"{method} {path} was answered after {took:.1f} s, though nothing else was disturbed")
    return response.status_code


def ask_until(
    episode: Episode, wanted: Collection[int], method: str, path: str, message: Any = None, **bound: float
) -> int:
    """Repeat a request until the answer is a wanted one, and return its status; 0 if there was none in time."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and not episode.violations:
        if (status := ask(episode, method, path, message, **bound)) in wanted:
            return status
        time.sleep(PAUSE_SECONDS)
    return 0


def list_checkpoints(episode: Episode) -> list[int]:
    """Return the rounds of the checkpoints that the coordinator lists, once it knows of any; none if it is too long."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and not episode.violations:
        with suppress(httpx.TransportError):
            response = httpx.get(f"{episode.cluster.address}{CHECKPOINTS}", timeout=CHANGE_SECONDS, trust_env=False)
            if response.is_success and (found := response.json()):
                return [one["round"] for one in found]
        time.sleep(PAUSE_SECONDS)
    return []
