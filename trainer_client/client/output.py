"""The command of a script, and the newest lines that it writes to `sys.stdout` and `sys.stderr`, for people."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from ps_protocol.process_reports import MAX_LINE, MAX_LINES, MAX_TRACEBACK, OutputLines, ScriptInfo


class OutputBuffer:
    """The newest lines of a script. They are numbered, so that a line that is sent twice counts once."""

    def __init__(self) -> None:
        self.traceback: str | None = None  # of the exception that ended the script
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._num_lines = 0  # lines that the script has written
        self._num_received = 0  # lines of them that an answered request has carried, or that came before these
        self._unfinished: dict[str, str] = {}  # the text after the last newline, by stream
        self._lock = threading.RLock()  # a signal handler may print, too
        self._pid = os.getpid()

    def add(self, stream: str, text: str) -> None:
        """Add text of a stream. Does nothing in a forked child, whose copy of the lock may be held."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            *lines, rest = (self._unfinished.get(stream, "") + encodable(text)).split("\n")
            self._lines.extend(_redraw(line).rstrip("\r")[:MAX_LINE] for line in lines[-MAX_LINES:])
            self._num_lines += len(lines)
            rest = _redraw(rest)
            self._unfinished[stream] = rest.rstrip("\r")[:MAX_LINE] + "\r" * rest.endswith("\r")

    def describe(self) -> OutputLines:
        """Return the lines that no answered request has carried, and the unfinished line of each stream."""
        with self._lock:
            first = max(self._num_received, self._num_lines - len(self._lines))
            lines = list(self._lines)[len(self._lines) - (self._num_lines - first) :]
            rest = (line.rstrip("\r")[:MAX_LINE] for line in self._unfinished.values())
            return OutputLines(first=first, lines=tuple(lines), unfinished=tuple(filter(None, rest)))

    def note_answered(self, sent: OutputLines) -> None:
        """Note that a request with these lines was answered."""
        self._num_received = sent.first + len(sent.lines)

    def note_exception(self, error: BaseException | None) -> None:
        """Keep the traceback of the exception that ended the script."""
        if error is not None and error.__traceback__ is not None:
            self.traceback = encodable("".join(traceback.format_exception(error))[-MAX_TRACEBACK:])


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which a message cannot contain."""
    return text.encode(errors="replace").decode()


def _redraw(line: str) -> str:
    """Return what a terminal shows of a line that is redrawn, with its last carriage return.

    >>> _redraw("10 %\\r20 %\\r")
    '20 %\\r'
    """
    return line[line.rstrip("\r").rfind("\r") + 1 :]


class KeptStream:
    """A stream that passes everything on unchanged, and adds the written text to a buffer."""

    def __init__(self, name: str, stream: Any, buffer: OutputBuffer) -> None:
        self._name = name
        self._stream = stream
        self._buffer: OutputBuffer | None = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        """Write to the stream, and keep the text."""
        written = self._stream.write(text)
        if self._buffer is not None:
            with contextlib.suppress(Exception):  # the script must not fail because of this
                self._buffer.add(self._name, text)
        return written

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def remove(self) -> None:
        """Stop keeping, and put the stream back unless the script has replaced it meanwhile."""
        self._buffer = None  # a logging handler may write to this object for as long as the process lives
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)


def keep_streams(buffer: OutputBuffer) -> list[KeptStream]:
    """Replace `sys.stdout` and `sys.stderr` by streams that add their text to a buffer. Return them."""
    streams = [
        KeptStream(name, getattr(sys, name), buffer) for name in ("stdout", "stderr") if getattr(sys, name) is not None
    ]
    for stream in streams:
        setattr(sys, stream._name, stream)
    return streams


def describe_script(run_name: str | None) -> ScriptInfo:
    """Return the command line of this process. A path below the working directory is shown from there."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        program = str(path.relative_to(Path.cwd()))
    return ScriptInfo(command=encodable(shlex.join([program, *arguments])), run_name=run_name)
