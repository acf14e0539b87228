"""The output of `gradpost up`: lines of all processes with their names, above one live line."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ps_protocol.printable import printable

MAX_HIDDEN_LINES = 20  # of each service, which are shown if it dies
REFRESHES_PER_SECOND = 8

_TRAINER_STYLES = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_LEVEL_STYLES = {"debug": "dim", "info": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}

_ENDING = (
    "run failed",
    "run stopped",
)  # the end of the run, which `gradpost up` reports once, and each service in its log
_WARNINGS = ("warning", "error", "critical")
_HIDDEN_FIELDS = ("event", "level", "timestamp", "role", "exception")  # shown otherwise, or not at all
_HIDDEN_TRAINER_FIELDS = ("run", "trainer")  # the prefix names them


@dataclass(frozen=True, slots=True)
class LogLine:
    """One entry of a structured log; `text` contains several lines if there is a traceback."""

    level: str
    text: str

    @property
    def is_warning(self) -> bool:
        return self.level in _WARNINGS


def parse_log_line(line: str) -> LogLine | None:
    """Parse a log line of Gradpost's processes; return None for any other line, such as a script's output.

    >>> parse_log_line('{"role": "pserver", "event": "no heartbeat", "level": "warning", "error": "a b", "round": 3}')
    LogLine(level='warning', text='no heartbeat error="a b" round=3')
    >>> parse_log_line('{"event": "my own JSON"}') is None
    True
    """
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not all(isinstance(entry.get(key), str) for key in ("role", "event", "level")):
        return None
    hidden = _HIDDEN_FIELDS + (_HIDDEN_TRAINER_FIELDS if entry["role"] == "trainer" else (entry["role"],))
    facts = [f"{key}={_show(value)}" for key, value in entry.items() if key not in hidden]
    lines = [" ".join([entry["event"], *facts]), *str(entry.get("exception") or "").splitlines()]
    return LogLine(entry["level"], "\n".join(map(printable, lines)))


def _show(value: object) -> str:
    if isinstance(value, str) and value and not any(c.isspace() or c == '"' for c in value):
        return value
    return json.dumps(value, ensure_ascii=False)


class Screen:
    """Printer for several threads: with colours (unless NO_COLOR is set) and the live line on a terminal, else plain.

    Log lines of services are hidden below warnings, and at the end of the run, unless `verbose`; their other lines are
    shown, as after a crash.
    With `as_json` all lines go to stderr, so that stdout contains the JSON only. `on_closed` is called when the
    reader of the output is gone.
    """

    def __init__(self, *, verbose: bool, as_json: bool, on_closed: Callable[[], None]) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a script may print characters that this terminal cannot show
        self._stream: TextIO = sys.stderr if as_json else sys.stdout
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self.is_terminal = self._stream.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self._verbose = verbose
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self.hides_interrupts = False
        self._in_traceback: set[str] = set()  # names of processes
        self.exceptions: dict[str, str] = {}  # the newest one of each process that printed a traceback
        self.problems: dict[str, str] = {}  # the newest warning or plain line of each process
        self._hidden: defaultdict[str, deque[LogLine]] = defaultdict(lambda: deque(maxlen=MAX_HIDDEN_LINES))

    @contextmanager
    def live(self, render: Callable[[], RenderableType]) -> Iterator[None]:
        """Show the result of `render` below all output during the block; on a terminal only."""
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
        """Show a line of a process, or keep it hidden."""
        entry = parse_log_line(line)
        if entry is None or entry.is_warning:
            self.problems[name] = line if entry is None else entry.text
        if entry is None:
            is_in_traceback = self._follow_traceback(name, line)
            if not (self.hides_interrupts and is_in_traceback):
                self._print(name, line)
        elif self._verbose or name.startswith("trainer") or (entry.is_warning and not entry.text.startswith(_ENDING)):
            self._show_entry(name, entry)
        else:
            self._hidden[name].append(entry)

    def _follow_traceback(self, name: str, line: str) -> bool:
        """Return whether the line is part of a traceback; its last line, the exception, is so after Ctrl-C only."""
        if line.startswith("Traceback "):
            self._in_traceback.add(name)
        if name not in self._in_traceback:
            return False
        if line and not line.startswith((" ", "Traceback ")):
            self._in_traceback.remove(name)
            self.exceptions[name] = re.sub(r"^[\w.]+\.", "", line)
            return line == "KeyboardInterrupt"
        return True

    def reveal(self, name: str) -> None:
        """Show the last hidden lines of a process."""
        for entry in self._hidden.pop(name, ()):
            self._show_entry(name, entry)

    def print_message(self, text: str, style: str = "") -> None:
        """Print a message of `gradpost up`: among the scripts' output on a terminal, else on stderr."""
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
        # Keeps the colours of a script, and removes its cursor movements.
        content = Text.from_ansi(text) if style is None else Text(text, style)
        line = Text.assemble((f"[{name}] ", _style_of(name)), content)
        self._guarded(lambda: self._console.print(line, soft_wrap=True))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            with self._lock:
                write()
        except OSError:  # EPIPE from a pipe, EIO from a terminal
            # The reader is gone. Later writes, also those at the interpreter's exit, must not fail.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._on_closed()


def _style_of(name: str) -> str:
    role, _, number = name.partition(" ")
    if role == "trainer" and number.isdecimal():
        return _TRAINER_STYLES[int(number) % len(_TRAINER_STYLES)]
    return "yellow"
