"""What `gradpost up` shows: everybody's output, each line with the name of its process, above one live line."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ps_protocol.printable import printable

from .log_lines import LogLine, parse_log_line

KEPT_LINES = 20  # hidden ones of each service, for the moment when it dies
REFRESHES_PER_SECOND = 8

_TRAINER_STYLES = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_LEVEL_STYLES = {"debug": "dim", "info": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}


class Screen:
    """Prints from any thread. On a terminal in colour (NO_COLOR is honoured) and with the live line, else plain.

    Of the services only warnings are shown unless `verbose`, and whatever is no log line: they have crashed.
    Scripts speak on stdout, or with `as_json` on stderr, so that stdout holds the JSON alone. `on_closed` is called
    when nobody reads any more.
    """

    def __init__(self, *, verbose: bool, as_json: bool, on_closed: Callable[[], None]) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a script may say what this terminal cannot show
        self._stream: TextIO = sys.stderr if as_json else sys.stdout
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._is_terminal = self._stream.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self._verbose = verbose
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._hidden: defaultdict[str, deque[LogLine]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))

    @property
    def is_terminal(self) -> bool:
        """Whether a person watches."""
        return self._is_terminal

    @contextmanager
    def live(self, render: Callable[[], RenderableType]) -> Iterator[None]:
        """Show what `render` gives below all output, for as long as the block lasts; on a terminal only."""
        if not self.is_terminal:
            yield
            return
        live = Live(
            get_renderable=render,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        with live:
            yield

    def show_line(self, name: str, line: str) -> None:
        """Show a line of a process's output, or hide it."""
        entry = parse_log_line(line)
        if entry is None:
            self._print(name, line)
        elif entry.is_warning or self._verbose or name.startswith("trainer"):
            self._show_entry(name, entry)
        else:
            self._hidden[name].append(entry)

    def reveal(self, name: str) -> None:
        """Show the last lines of a process that were hidden."""
        for entry in self._hidden.pop(name, ()):
            self._show_entry(name, entry)

    def say(self, text: str, style: str = "") -> None:
        """Say something of our own: beside the scripts' output on a terminal, else on stderr."""
        if self.is_terminal:
            self._guarded(lambda: self._console.print(Text(printable(f"gradpost: {text}"), style), soft_wrap=True))
        else:
            self._guarded(lambda: print(f"gradpost: {printable(text)}", file=sys.stderr, flush=True))

    def _show_entry(self, name: str, entry: LogLine) -> None:
        for part in entry.text.split("\n"):
            self._print(name, part, _LEVEL_STYLES.get(entry.level, ""))

    def _print(self, name: str, text: str, style: str | None = None) -> None:
        if not self.is_terminal:
            self._guarded(lambda: print(f"[{name}] {text}", file=self._stream, flush=True))
            return
        # A script's own colours, and none of its cursor movements.
        content = Text.from_ansi(text) if style is None else Text(text, style)
        line = Text.assemble((f"[{name}] ", _style_of(name)), content)
        self._guarded(lambda: self._console.print(line, soft_wrap=True))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            with self._lock:
                write()
        except OSError:  # EPIPE from a pipe, EIO from a terminal
            # Nobody reads any more. What is still written, at the interpreter's exit too, goes nowhere.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._on_closed()


def _style_of(name: str) -> str:
    role, _, number = name.partition(" ")
    if role == "trainer" and number.isdecimal():
        return _TRAINER_STYLES[int(number) % len(_TRAINER_STYLES)]
    return "yellow"
