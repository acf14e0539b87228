"""`gradpost status --watch`: the same again and again, in place on a terminal, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ps_protocol.errors import Unreachable
from ps_protocol.messages import ClusterStatus
from ps_protocol.printable import printable
from trainer_client.inspection import ClusterView

from .output import warn
from .status import describe_status, print_status

WATCH_SECONDS = 1.0
REFRESHES_PER_SECOND = 2  # the time without an answer goes on while one is waited for


class Watched:
    """The newest status, and since when there has been none."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self.status: ClusterStatus = view.status()  # who cannot be reached at first has another address, most likely
        self._answered_at = time.monotonic()
        self.trouble = ""

    def ask(self) -> None:
        """Ask again; a coordinator that is away may come back. Raises what it answers instead of a status."""
        try:
            self.status = self._view.status()
        except Unreachable as error:
            self.trouble = str(error)
        else:
            self.trouble, self._answered_at = "", time.monotonic()

    def __rich__(self) -> Group:
        silent = time.monotonic() - self._answered_at
        head = [Text(f"{self._view.coordinator}   every {WATCH_SECONDS:g} s, until Ctrl-C", "dim")]
        if self.trouble:
            head.append(Text(f"no coordinator for {silent:.0f} s: {printable(self.trouble)}", "bold red"))
            head.append(Text("Asking again; this is how it was:", "red"))
        parts = describe_status(self.status)
        return Group(*head, *(Text(printable(part)) if isinstance(part, str) else part for part in parts))


def watch_status(view: ClusterView, *, as_json: bool) -> None:
    """Show it until Ctrl-C, and leave the newest on the terminal. Raises GradpostError if there is none at first."""
    watched = Watched(view)
    console = Console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        with suppress(KeyboardInterrupt):
            _print_again_and_again(watched, as_json=as_json)
        return
    with suppress(KeyboardInterrupt), Live(
        watched, console=console, screen=True, refresh_per_second=REFRESHES_PER_SECOND
    ):  # fmt: skip
        while True:
            time.sleep(WATCH_SECONDS)
            watched.ask()
    print_status(watched.status)
    if watched.trouble:
        warn(f"no coordinator at the end: {watched.trouble}")


def _print_again_and_again(watched: Watched, *, as_json: bool) -> None:
    was_away = ""
    while True:
        if not watched.trouble:
            print_status(watched.status, as_json=as_json)
            sys.stdout.flush()
        elif not was_away:
            warn(f"no coordinator: {watched.trouble}; asking again")
        was_away = watched.trouble
        time.sleep(WATCH_SECONDS)
        watched.ask()
