"""Bearer tokens: their scopes, and the files that hold them.

A folder of tokens has one file for each scope, such as `read`, each with one token on one line. While a token is being
replaced, the older one stays valid in `read.previous`. Other programs, such as Prometheus with its `credentials_file`,
can always send the token in `read`.

Files are read again when they change, without a restart. No message or log contains a token.
"""

from __future__ import annotations

import hmac
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from .environment import SettingsError, stamp_file

Scope = Literal["read", "train", "admin"]

SCOPES: tuple[Scope, ...] = ("read", "train", "admin")  # each includes those before it
PREVIOUS = ".previous"
MIN_LENGTH, MAX_LENGTH = 20, 1000
CHECK_SECONDS = 1.0  # until a changed file is read; a token that is not known makes the service read it at once
_POLL_SECONDS = 0.2

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # token68 of RFC 9110, which is what may follow `Bearer`

Warn = Callable[[str], None]


def includes(given: Scope, needed: Scope) -> bool:
    """Return whether a token of scope `given` is sufficient where scope `needed` is required.

    >>> includes("admin", "train"), includes("read", "train")
    (True, False)
    """
    return SCOPES.index(needed) <= SCOPES.index(given)


def parse_authorization(header: str) -> str | None:
    """Return the token of an Authorization header; None for another scheme.

    >>> parse_authorization("bearer abc")
    'abc'
    """
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class TokenFile:
    """A file with one token, read again when it changes. Calls `warn` with a line about each new problem."""

    def __init__(self, path: Path, warn: Warn = lambda _: None) -> None:
        self.path = path
        self.problem = ""  # why there is no token, or only an older one
        self._warn = warn
        self._token: str | None = None
        self._stamp: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"<TokenFile {self.path}>"  # never what it holds

    def read(self) -> str | None:
        """Return the token; None if there is no such file.

        If the file holds no token, the token before stays valid: an error in editing must not stop a run. Removing the
        file revokes the token.
        """
        try:
            stamp = stamp_file(self.path)  # empty without a file, which cannot be read either
            if stamp != self._stamp:
                self._token = _parse_token(self.path.read_text(encoding="ascii", errors="replace"))
                self._stamp = stamp
                self._report(self._mode_problem(self.path.stat()))
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
        # In Kubernetes the files of a Secret belong to root and to the pod's group (fsGroup), which may read them
        # whatever `defaultMode` says. A process can only read them as a member of the group.
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
    """The tokens that a client sends: the token of a file, and the token that it replaced, while its file exists."""

    def __init__(self, path: Path, warn: Warn = lambda _: None) -> None:
        self.path = path
        self._files = (TokenFile(path, warn), TokenFile(path.with_name(path.name + PREVIOUS), warn))
        self._last: list[str] = []

    def read(self) -> list[str]:
        """Return the tokens, newest first, or the last known ones if the file is gone.

        Raises SettingsError if there never was a token.
        """
        newest, previous = (file.read() for file in self._files)
        if newest is not None:
            self._last = [newest] if previous is None else [newest, previous]
        elif not self._last:
            problem = self._files[0].problem or f"there is no token file {self.path}"
            raise SettingsError(f"{problem}; `gradpost token create` writes one")
        return self._last

    def wait_for_token(self, seconds: float, warn: Warn) -> Iterator[float]:
        """Yield the seconds to pause until there is a token. Services may start before the file is written.

        Calls `warn` once about it, and raises SettingsError after `seconds`.
        """
        deadline = time.monotonic() + seconds
        is_said = False
        while True:
            try:
                self.read()
                return
            except SettingsError as error:
                if time.monotonic() > deadline:
                    raise
                if not is_said:
                    warn(f"waiting for a token, {seconds:g} s at most: {error}")
                    is_said = True
            yield _POLL_SECONDS


class TokenFolder:
    """The tokens that a service accepts: for each scope the newest one and the one before it."""

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
        """Return the widest scope of a token, or None. The time does not depend on how much of the token is right."""
        now = time.monotonic()
        if now >= self._next_check:
            self._read(now)
        candidate = token.encode()
        found = self._find(candidate)
        if found is None:  # it may be newer than the files that were read
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
