"""A pserver's own folder: one process at a time holds it, and finds there who it was.

{state_dir}/pserver-0/lock             held as long as the process lives
                      identity.json    incarnation, and the run that it serves
                      log/             of that run
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import field_validator

from ps_protocol.errors import GradpostError
from ps_protocol.fields import Message
from ps_protocol.messages import InstallRun
from ps_protocol.vocabulary import Incarnation, PserverIndex
from services.runtime.checkpoints import leave_out_removed
from services.runtime.locks import lock_folder
from services.runtime.places import write_file
from services.runtime.sealed import DamagedFile, seal, unseal

IDENTITY = "identity.json"


class FolderTaken(GradpostError):  # noqa: N818 - as all of its kind
    """Another process holds this folder."""


class Identity(Message):
    """Which life of the pserver wrote this, and what it served."""

    incarnation: Incarnation = 0
    run: InstallRun | None = None

    @field_validator("run", mode="before")
    @classmethod
    def _accept_earlier(cls, run: Any) -> Any:
        match run:
            case {"consistency": {"step_count": "trainer"}}:
                raise ValueError("step_count is trainer, and its log does not say whose steps it counts")
            case {"consistency": consistency}:
                return {**run, "consistency": leave_out_removed(consistency)}
        return run


class StateFolder:
    """Locked as long as this object is open. Raises FolderTaken, and OSError if the disk cannot be used."""

    def __init__(self, state_dir: Path, index: PserverIndex) -> None:
        self.index = index
        self.path = state_dir / f"pserver-{index}"
        lock = lock_folder(self.path)
        if lock is None:
            raise FolderTaken(
                f"{self.path} is in use by another process; a pserver needs a folder of its own "
                "(GRADPOST_PSERVER_INDEX, GRADPOST_STATE_DIR)"
            )
        self._lock = lock
        try:
            self.identity = self._read_identity()
        except OSError:
            self.close()
            raise

    def __repr__(self) -> str:
        run = self.identity.run.run if self.identity.run else "no run"
        return f"<StateFolder {self.path} [incarnation {self.identity.incarnation} | {run}]>"

    @property
    def log_path(self) -> Path:
        """Where the log of the run lies."""
        return self.path / "log"

    def _read_identity(self) -> Identity:
        path = self.path / IDENTITY
        if not path.exists():
            return Identity()
        try:
            return unseal(path.read_bytes(), Identity, str(path))
        except DamagedFile as error:
            raise DamagedFile(f"{error}; delete it, and the run goes back to the newest checkpoint") from None

    def write_identity(self, incarnation: Incarnation, run: InstallRun | None) -> None:
        """Remember who this process is now. Raises FolderTaken if a later life has written there (the lock is lost)."""
        if self._read_identity().incarnation > incarnation:
            raise FolderTaken(f"{self.path} belongs to a later life of pserver {self.index}")
        self.identity = Identity(incarnation=incarnation, run=run)
        write_file(self.path / IDENTITY, [seal(self.identity)])

    def forget_log(self) -> None:
        """Delete the log of a run that is no more. Raises OSError: what is left would be taken for the next run's."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.log_path)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)


def open_folder(state_dir: Path, index: PserverIndex | None) -> StateFolder | None:
    """The folder of this index or, without one, of any pserver here that nobody holds; None if there is none.

    Raises FolderTaken if the index is given and another process holds its folder.
    """
    if index is not None:
        return StateFolder(state_dir, index)
    for path in sorted(state_dir.glob("pserver-*")):
        number = path.name.removeprefix("pserver-")
        if number.isdigit():
            try:
                return StateFolder(state_dir, int(number))
            except FolderTaken:
                continue
    return None
