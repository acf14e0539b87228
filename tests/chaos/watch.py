"""A watch on the disks of a history: listed checkpoints can be restored, and logs are bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from glob import glob  # folders may be deleted meanwhile, which a Path's raises
from pathlib import Path

import httpx

from services.runtime.checkpoints import read_manifest, read_shard_file
from services.runtime.storage import LocalStorage

from .setup import KEEP_CHECKPOINTS, Setup

LOOK_SECONDS = 0.5


class Watch:
    """The checks of the disks, which call `complain` with each violation.

    `spoiled` are files that were damaged on purpose.
    """

    def __init__(
        self, setup: Setup, state: Path, http: httpx.Client, complain: Callable[[str], None], spoiled: Collection[Path]
    ) -> None:
        self.num_restorable = 0  # checkpoints that were complete and listed before and after they were read
        self._setup = setup
        self._state = state
        self._place = LocalStorage(state / "checkpoints")
        self._http = http
        self._complain = complain
        self._spoiled = spoiled

    def run(self, is_over: threading.Event) -> None:
        """Check everything until the event is set, and once more."""
        try:
            with self._http:
                while not is_over.wait(LOOK_SECONDS):
                    self.look()
                self.look()
        except Exception as error:
            self._complain(f"the disks could not be looked at: {error!r}")

    def look(self) -> None:
        """Check everything once."""
        self._look_at_checkpoints()
        for index in range(self._setup.num_pservers):
            self._look_at_disk(index)

    # ------------------------------------------------------------------ checkpoints

    def _look_at_checkpoints(self) -> None:
        before = self._list_complete()
        found = {one: error for one in before if (error := self._read(*one)) is not None}
        still = set(self._list_complete())  # else it was deleted, or undone, while it was read
        self.num_restorable += len(still.intersection(before) - set(found))
        for run, round_ in still & set(found):
            self._complain(f"the checkpoint of round {round_} is listed as complete, but {found[run, round_]}")

    def _list_complete(self) -> list[tuple[str, int]]:
        """Return run and round of each checkpoint that the coordinator lists; none while it is away or starts."""
        try:
            response = self._http.get("/v1/checkpoints")
        except httpx.TransportError:
            return []
        if response.is_server_error:
            return []
        return [(one["run"], one["round"]) for one in response.raise_for_status().json()]

    def _read(self, run: str, round_: int) -> str | None:
        """Return why a checkpoint cannot be restored; None if it can, or was damaged on purpose."""
        try:
            manifest = read_manifest(self._place, run, round_)
            if manifest is None:
                return "it has no manifest"
            for file in manifest.shards:
                if not any(path.name == file.name and int(path.parent.name) == round_ for path in self._spoiled):
                    read_shard_file(self._place, run, file)
        except OSError as error:
            return str(error)
        return None if len(manifest.shards) == self._setup.num_pservers else f"it has {len(manifest.shards)} shards"

    # ------------------------------------------------------------------ bounds

    def _look_at_disk(self, index: int) -> None:
        """Compare the disk usage of a pserver with the bounds of docs/reliability.md."""
        for folder in (f"pserver-{index}", *glob(f"pserver-{index}-*", root_dir=self._state)):  # of standbys
            self._look_at_folder(index, folder)

    def _look_at_folder(self, index: int, folder: str) -> None:
        log = sum(size for size, _ in map(_measure, glob(f"{self._state}/{folder}/log/*.log")))
        shared = glob(f"{self._state}/checkpoints/*/*/pserver-{index}-of-*.safetensors")
        own = glob(f"{self._state}/{folder}/log/*.safetensors")
        sizes = [size for size, _ in {_measure(name) for name in (*own, *shared)}]  # a file may have two names
        most = (KEEP_CHECKPOINTS + 2) * self._setup.max_log_bytes
        if log > most:
            self._complain(f"the log in {folder} takes {log} bytes, {most} at most are documented")
        most = 3 * (KEEP_CHECKPOINTS + 1) * max(sizes, default=0)
        if sum(sizes) > most:
            self._complain(f"the checkpoints of pserver {index} take {sum(sizes)} bytes, {most} at most are documented")


def _measure(name: str) -> tuple[int, int]:
    """Return size and inode of a file."""
    try:
        found = os.stat(name)
    except FileNotFoundError:  # deleted, or renamed, meanwhile
        return 0, 0
    return found.st_size, found.st_ino
