"""The output of `gradpost up`: lines of all processes with their names, above one live line, and the final report."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from signal import SIGKILL, Signals
from typing import NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ps_protocol.errors import GradpostError
from ps_protocol.messages import ClusterStatus, RunSummary
from ps_protocol.printable import printable
from trainer_client.client.inspection import ClusterView

from ..output import print_json, print_line, print_rows

MAX_HIDDEN_LINES = 20  # of each service, which are shown if it dies
REFRESHES_PER_SECOND = 8
PERIOD_SECONDS = 0.5  # between questions of the live line
SLOW_ROUND_SECONDS = 2.0  # the live line names the missing trainers of a round that waits longer

_TRAINER_STYLES = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_LEVEL_STYLES = {"debug": "dim", "info": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}

_ENDINGS = ("run failed", "run stopped")  # `gradpost up` reports it once, and each service in its log
_HIDDEN_FIELDS = {"event", "level", "timestamp", "role", "exception"}  # shown otherwise, or not at all


class LogLine(NamedTuple):
    """One entry of a structured log; `text` contains several lines if there is a traceback."""

    level: str
    text: str


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
    hidden = _HIDDEN_FIELDS | {"run", entry["role"]}  # the prefix names the process
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
    shown, as after a crash. With `as_json` all lines go to stderr, so that stdout contains the JSON only. `on_closed`
    is called when the reader of the output is gone.
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
        self._hidden: defaultdict[str, deque[LogLine]] = defaultdict(lambda: deque(maxlen=MAX_HIDDEN_LINES))

    def live(self, line: RenderableType) -> Live:
        """Return a block during which a line is shown below all output, on a terminal."""
        return Live(
            line,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def show_line(self, name: str, line: str) -> None:
        """Show a line of a process, or keep it hidden."""
        entry = parse_log_line(line)
        if entry is None:
            if not (self.hides_interrupts and self._is_of_interrupt(name, line)):
                self._print(name, line)
            return
        is_warning = entry.level not in ("debug", "info") and not entry.text.startswith(_ENDINGS)
        if self._verbose or is_warning or name.startswith("trainer"):
            self._show_entry(name, entry)
        else:
            self._hidden[name].append(entry)

    def _is_of_interrupt(self, name: str, line: str) -> bool:
        """Return whether the line is part of a traceback, but not its last line, unless that is KeyboardInterrupt."""
        if line.startswith("Traceback "):
            self._in_traceback.add(name)
        elif line and not line.startswith(" ") and name in self._in_traceback:
            self._in_traceback.remove(name)
            return line == "KeyboardInterrupt"
        return name in self._in_traceback

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


# ---------------------------------------------------------------------- the live line and the report


@contextmanager
def show_progress(screen: Screen, view: ClusterView, *, is_shown: bool) -> Iterator[None]:
    """Show the live line during the block, if there is a terminal for it. A thread updates it from the coordinator."""
    if not (is_shown and screen.is_terminal):
        yield
        return
    spinner, is_over = Spinner("dots", Text("starting", "bold"), style="green"), threading.Event()

    def update() -> None:
        while not is_over.wait(PERIOD_SECONDS):
            with suppress(GradpostError, RuntimeError):  # the latter if the cluster has been stopped
                line = printable(describe(view.status(), view.summary()))
                spinner.text = Text(line, "bold", no_wrap=True, overflow="ellipsis")

    thread = threading.Thread(target=update, name="progress", daemon=True)
    thread.start()
    try:
        with screen.live(spinner):
            yield
    finally:
        is_over.set()
        thread.join()


def describe(status: ClusterStatus, summary: RunSummary) -> str:
    """Return the live line: the run's state, round, mean speed, time, missing trainers and results."""
    if status.state == "gathering":
        return "waiting for " + ", ".join(status.waiting_for)
    parts = [f"{'paused' if status.is_paused else status.state}: round {summary.rounds:,}"]
    if summary.new_rounds and summary.seconds:
        parts.append(f"{summary.new_rounds / summary.seconds:.1f} rounds/s")
    parts.append(f"elapsed {int(summary.seconds) // 60}:{int(summary.seconds) % 60:02}")
    waiting = [p.heartbeat for p in status.pservers if p.heartbeat.missing]
    slowest = max(waiting, key=lambda one: one.waiting_seconds, default=None)
    if slowest is not None and slowest.waiting_seconds > SLOW_ROUND_SECONDS:
        names = ", ".join(f"trainer {rank}" for rank in slowest.missing)
        parts.append(f"waiting for {names} ({slowest.waiting_seconds:.0f} s)")
    parts += [f"{name} {value:.4g}" for name, value in sorted(summary.results.items())]  # last: a terminal may cut them
    return "  ".join(parts)


def describe_end(code: int) -> str:
    """Describe how a process ended.

    >>> describe_end(3), describe_end(-9), describe_end(0)
    ('failed with exit code 3', 'was ended by SIGKILL (out of memory?)', 'ended')
    """
    if code >= 0:
        return f"failed with exit code {code}" if code else "ended"
    hint = " (out of memory?)" if code == -SIGKILL else ""
    return f"was ended by {Signals(-code).name}{hint}"


def print_summary(summary: RunSummary, outcome: str | None = None, *, as_json: bool) -> None:
    """Print tables and the final line of the run, or JSON. `outcome` is the first word of the line."""
    if as_json:
        print_json({**json.loads(summary.model_dump_json()), "seconds_a_round": seconds_a_round(summary)})
        return
    print_line()
    shown: dict[str, object] = {"rounds": summary.rounds}
    if summary.earlier_rounds:
        shown["new rounds"] = summary.new_rounds
    shown |= {"seconds": f"{summary.seconds:.1f}", "seconds a round": seconds_a_round(summary)}
    print_rows([shown | dict(sorted(summary.results.items()))])
    print_rows(
        [
            {
                "pserver": shard.index,
                "shard bytes": shard.shard_bytes,
                "pushed bytes": shard.pushed_bytes,
                "pulled bytes": shard.pulled_bytes,
            }
            for shard in summary.shards
        ]
    )
    print_line(summary.line(outcome))


def seconds_a_round(summary: RunSummary) -> float:
    """Return the mean time of a round since the run was started or resumed; 0 without rounds."""
    return summary.seconds / summary.new_rounds if summary.new_rounds else 0.0
