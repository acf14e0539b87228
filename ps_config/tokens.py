"""Bearer tokens: which scopes there are, and the files that tokens live in.

A folder of tokens has one file for each scope, `read`, `train` and `admin`, each with one token on one line. While a
token is being replaced, the older one is valid beside it and stands in `read.previous` (and so on): so `read` is at
any time what a program can send that knows nothing of this, such as Prometheus with its `credentials_file`.

Files are read again when they change, so that nothing has to be restarted. No token is ever part of a message.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .environment import SettingsError

Scope = Literal["read", "train", "admin"]

SCOPES: tuple[Scope, ...] = ("read", "train", "admin")  # each may do what those before it may
PREVIOUS = ".previous"
MIN_LENGTH, MAX_LENGTH = 20, 1000
CHECK_SECONDS = 1.0  # a file that changed is noticed so soon; a token that is not known makes us look at once
_POLL_SECONDS = 0.2

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # token68 of RFC 9110, which is what may follow `Bearer`

Warn = Callable[[str], None]


def includes(given: Scope, needed: Scope) -> bool:
    """Whether a token of scope `given` may do what needs scope `needed`.

    >>> includes("admin", "train"), includes("read", "train")
    (True, False)
    """
    return SCOPES.index(given) >= SCOPES.index(needed)


def parse_authorization(header: str) -> str | None:
    """The token of an Authorization header; None if it is of another scheme.

    >>> parse_authorization("bearer abc")
    'abc'
    """
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class TokenFile:
    """One file with one token, read again when it changes. `warn` gets a line about each new problem with it."""

    def __init__(self, path: Path, warn: Warn = lambda _: None) -> None:
        self.path = path
        self.problem = ""  # why it holds no token, or only what it held before
        self._warn = warn
        self._token: str | None = None
        self._stamp: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"<TokenFile {self.path}>"  # never what it holds

    def read(self) -> str | None:
        """The token; None if there is no such file. What was read before stays if the file holds something else.

        So a slip of whoever edits it stops nothing that runs; removing the file takes the token back.
        """
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size)
            if stamp != self._stamp:
                self._token = _parse_token(self.path.read_text(encoding="ascii", errors="replace"))
                self._stamp = stamp
                self._report(self._mode_problem(status))
        except (FileNotFoundError, NotADirectoryError):
            self._token = self._stamp = None
            self._report("")
        except OSError as error:
            self._report(f"{self.path} cannot be read: {error.strerror}")
        except ValueError as error:
            self._report(f"{self.path} holds no token: {error}")
        return self._token

    def _mode_problem(self, status: os.stat_result) -> str:
        if os.name != "posix":
            return ""
        # Kubernetes gives a Secret's files to root and to the pod's group (fsGroup), and lets that read them whatever
        # `defaultMode` says: such a process reads them as one of the group or not at all.
        through_group = status.st_uid != os.geteuid() and status.st_gid in (os.getegid(), *os.getgroups())
        if not status.st_mode & (0o037 if through_group else 0o077):
            return ""
        return (
            f"{self.path} may be read by others (mode {status.st_mode & 0o777:04o}): chmod 400 it, "
            "or set defaultMode: 0400 for a volume of Kubernetes"
        )

    def _report(self, problem: str) -> None:
        if problem and problem != self.problem:
            self._warn(problem)
        self.problem = problem


class TokenPair:
    """What a caller sends: the token of a file, and the one that it replaced, as long as that is there."""

    def __init__(self, path: Path, warn: Warn = lambda _: None) -> None:
        self.path = path
        self._files = (TokenFile(path, warn), TokenFile(path.with_name(path.name + PREVIOUS), warn))
        self._last: list[str] = []

    def read(self) -> list[str]:
        """Newest first; what was read before if the file is gone. Raises SettingsError if there never was a token."""
        newest, previous = (file.read() for file in self._files)
        if newest is not None:
            self._last = [newest] if previous is None else [newest, previous]
        elif not self._last:
            problem = self._files[0].problem or f"there is no token file {self.path}"
            raise SettingsError(f"{problem}; `gradpost token create` writes one")
        return self._last

    async def wait(self, seconds: float, say: Warn, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a token, so that whoever writes it may start later; `say` hears of it once.

        False if `give_up` said so before it came. Raises SettingsError after so many `seconds`.
        """
        deadline = time.monotonic() + seconds
        is_said = False
        while True:
            try:
                self.read()
                return True
            except SettingsError as error:
                if time.monotonic() > deadline:
                    raise
                if not is_said:
                    say(f"waiting for a token, {seconds:g} s at most: {error}")
                    is_said = True
            if give_up():
                return False
            await asyncio.sleep(_POLL_SECONDS)


class TokenFolder:
    """What a service accepts: for each scope the newest token and the one before it."""

    def __init__(self, folder: Path, warn: Warn = lambda _: None) -> None:
        self.folder = folder
        self._files = [
            (scope, TokenFile(folder / (scope + suffix), warn))
            for scope in reversed(SCOPES)
            for suffix in ("", PREVIOUS)
        ]
        self._tokens: list[tuple[Scope, bytes]] = []
        self._next_check = 0.0

    def scope_of(self, token: str) -> Scope | None:
        """The widest scope of a token, or None. Takes as long for a token that is nearly right as for any other."""
        now = time.monotonic()
        if now >= self._next_check:
            self._read(now)
        candidate = token.encode()
        found = self._find(candidate)
        if found is None:  # it may be newer than what we have read
            self._read(now)
            found = self._find(candidate)
        return found

    def _find(self, candidate: bytes) -> Scope | None:
        scopes = [scope for scope, token in self._tokens if hmac.compare_digest(token, candidate)]
        return scopes[0] if scopes else None

    def _read(self, now: float) -> None:
        self._next_check = now + CHECK_SECONDS
        self._tokens = [(scope, token.encode()) for scope, file in self._files if (token := file.read()) is not None]


def _parse_token(text: str) -> str:
    token = text.strip()
    if not (_TOKEN.fullmatch(token) and MIN_LENGTH <= len(token) <= MAX_LENGTH):
        raise ValueError(f"one line of {MIN_LENGTH} to {MAX_LENGTH} letters, digits and -._~+/ is expected")
    return token
