"""How `gradpost up` ends: who is to blame, the exit code, and when those that still run are ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

FAILED_GRACE_SECONDS = 5.0  # what the others get after a failure, to hear of it and print the named error
HOPELESS_GRACE_SECONDS = 1.0  # the same where they would hear of nothing
STOP_GRACE_SECONDS = 3.0  # between asking to stop and SIGKILL


@dataclass(slots=True)
class Ending:
    """An end before all scripts were done; those that still run are asked to stop, and made to."""

    exit_code: int
    reason: str
    ask_at: float  # by the monotonic clock
    ask_with: signal.Signals = signal.SIGTERM
    by_script: bool = False  # the exit code is a script's

    @property
    def kill_at(self) -> float:
        """When patience ends."""
        return self.ask_at + STOP_GRACE_SECONDS

    def hurry(self, now: float) -> None:
        """Somebody is in a hurry: ask now, or kill now what has been asked already."""
        self.ask_at = now - STOP_GRACE_SECONDS if self.ask_at <= now else now


def end_by_signal(received: signal.Signals, now: float) -> Ending:
    """The user, or the system, ends it: scripts get the same signal at once."""
    ask_with = received if received == signal.SIGINT else signal.SIGTERM
    words = {signal.SIGINT: "interrupted", signal.SIGPIPE: "nobody reads the output any more"}
    return Ending(128 + received, words.get(received, f"ended by {received.name}"), now, ask_with)


def end_by_script(rank: int, code: int, now: float, *, others_know: bool) -> Ending:
    """A script failed, and takes the others with it once they had time to say what that means for them."""
    grace = FAILED_GRACE_SECONDS if others_know else HOPELESS_GRACE_SECONDS
    return Ending(exit_code_of(code), f"trainer {rank} {describe_end(code)}", now + grace, by_script=True)


def blame(ending: Ending, codes: Mapping[int, int], named: Collection[int], ended_by_us: Collection[int]) -> Ending:
    """The ending as it is reported: by the trainer that the cluster names, if its script failed by itself.

    The one that fails first need not be the first to exit: the others hear of it and may be quicker.
    """
    if ending.by_script:
        for rank in named:
            if codes.get(rank) and rank not in ended_by_us:
                return end_by_script(rank, codes[rank], ending.ask_at, others_know=True)
    return ending


def exit_code_of(code: int) -> int:
    """A child's exit code as shells report it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def describe_end(code: int) -> str:
    """How a process ended, in words.

    >>> describe_end(3), describe_end(-9), describe_end(0)
    ('failed with exit code 3', 'was ended by SIGKILL (out of memory?)', 'ended')
    """
    if code == 0:
        return "ended"
    if code > 0:
        return f"failed with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"
