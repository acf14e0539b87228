"""The audit log: requests of administrators and their outcomes, as lines of JSON that are written before any change.

A line `requested` without a later line of its number belongs to a change whose end was not recorded: the coordinator
died, or the change is under way.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from ps_protocol.fields import Message
from ps_protocol.vocabulary import Round
from services.runtime.storage import sync_folder

FILE = "audit.jsonl"
MAX_LISTED = 1000


class AuditEntry(Message):
    """One line of the audit log."""

    number: int
    at: float = Field(description="time of the entry, in seconds since 1970, by the coordinator's clock")
    by: str = Field(description="beginning of the digest of the request's token")
    run: str
    action: str
    arguments: dict[str, Any] = Field(default={})
    outcome: Literal["requested", "done", "failed"]
    attempt: int
    round: Round | None = Field(default=None, description="round from which the change applies")
    detail: str = ""


class AuditLog:
    """The log of one process, which must call `read` first."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._entries: deque[AuditEntry] = deque(maxlen=MAX_LISTED)

    def read(self) -> None:
        """Read the newest lines of earlier processes. Torn and foreign lines are skipped. Blocks. Raises OSError."""
        if not self._path.exists():
            return
        with self._path.open(errors="replace") as file:
            for line in deque(file, MAX_LISTED):
                with suppress(ValidationError):
                    self._entries.append(AuditEntry.model_validate_json(line))

    def entries(self) -> list[AuditEntry]:
        """Return the newest entries, oldest first."""
        return list(self._entries)

    def add(self, **members: Any) -> AuditEntry:
        """Write a line. Without a `number` it gets the next one. Blocks. Raises OSError."""
        number = members.pop("number", None) or max((entry.number for entry in self._entries), default=0) + 1
        entry = AuditEntry(number=number, at=time.time(), **members)
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A line of its own, even after a torn one.
            line = b"%s%s\n" % (b"" if self._ends_well() else b"\n", entry.model_dump_json().encode())
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, f"{self._path} has no room for a whole line: free disk space")
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_folder(self._path.parent)
        self._entries.append(entry)
        return entry

    def _ends_well(self) -> bool:
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
