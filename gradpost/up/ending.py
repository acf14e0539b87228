"""The end of `gradpost up`: its cause and exit code, and when running scripts are stopped. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

EXIT_NOT_EXECUTABLE = 126  # as in shells, env and timeout
EXIT_NOT_FOUND = 127
EXIT_BY_SIGNAL = 128  # and its number
FAILED_GRACE_SECONDS = 5.0  # for the other scripts to learn of a failure and print it
HOPELESS_GRACE_SECONDS = 1.0  # if they cannot learn of it
STOP_GRACE_SECONDS = 3.0  # between the first signal and SIGKILL


@dataclass(slots=True)
class Ending:
    """An end before all scripts were done: running scripts get a signal at `signal_at`, and SIGKILL at `kill_at`."""

    exit_code: int
    reason: str
    signal_at: float  # by the monotonic clock
    stop_signal: signal.Signals = signal.SIGTERM
    rank: int | None = None  # the trainer whose script gave the exit code

    @property
    def by_script(self) -> bool:
        return self.rank is not None

    @property
    def by_signal(self) -> bool:
        return self.rank is None and self.exit_code > EXIT_BY_SIGNAL

    @property
    def kill_at(self) -> float:
        """The time of SIGKILL, by the monotonic clock."""
        return self.signal_at + STOP_GRACE_SECONDS

    def hurry(self, now: float) -> None:
        """Send the first signal now, or SIGKILL if it was sent already."""
        self.signal_at = now - STOP_GRACE_SECONDS if self.signal_at <= now else now


def end_by_signal(received: signal.Signals, now: float) -> Ending:
    """Return the ending for a signal that this process received: scripts get it immediately."""
    forwarded = received if received == signal.SIGINT else signal.SIGTERM
    words = {signal.SIGINT: "interrupted", signal.SIGPIPE: "the reader of the output is gone"}
    return Ending(EXIT_BY_SIGNAL + received, words.get(received, f"ended by {received.name}"), now, forwarded)


def end_by_script(rank: int, code: int, now: float, *, others_know: bool) -> Ending:
    """Return the ending for a failed script: the others are stopped after they had time to report it."""
    grace = FAILED_GRACE_SECONDS if others_know else HOPELESS_GRACE_SECONDS
    return Ending(
        EXIT_BY_SIGNAL - code if code < 0 else code, f"trainer {rank} {describe_end(code)}", now + grace, rank=rank
    )


def blame(ending: Ending, codes: Mapping[int, int], failure: Mapping[str, Any], ended_by_us: Collection[int]) -> Ending:
    """Return the ending with the trainer that the cluster's failure names as its cause.

    The script that fails first need not be the first to exit, since the others learn of its failure. Of a script that
    hung until it was ended by us, the failure describes the cause.
    """
    named = failure.get("ranks") or failure.get("missing") or ()
    if ending.by_script:
        for rank in named:
            if rank in ended_by_us:
                return replace(ending, reason=failure["detail"])
            if codes.get(rank):
                return end_by_script(rank, codes[rank], ending.signal_at, others_know=True)
    return ending


def describe_end(code: int) -> str:
    """Describe how a process ended.

    >>> describe_end(3), describe_end(-9), describe_end(0)
    ('failed with exit code 3', 'was ended by SIGKILL (out of memory?)', 'ended')
    """
    if code == 0:
        return "ended"
    if code > 0:
        return f"failed with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"
