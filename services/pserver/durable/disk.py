"""The disk of a pserver process: its folder, which one process at a time locks, and the state of its run.

{state_dir}/pserver-0/lock             locked while the process lives
                      identity.json    incarnation, and the run that it serves
                      log/             of that run, and its snapshots
            pserver-0-1/…              the same of a standby, with incarnation 0 until it is promoted

At the start, before it registers:  open()                locks the folder and restores the run in it
Once it is registered:              write_incarnation()   fences off the earlier incarnation
For every installation:             open_run()            begins a run's state, or resumes at the requested round

A standby, for every copy:          begin_replica()       writes the copy, and begins a log behind it
Once it is promoted:                adopt_replica()       holds the replica in memory like a run that open() restored
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ps_protocol.errors import GradpostError, StorageFailed, UnsupportedFormat
from ps_protocol.fields import Message
from ps_protocol.membership import HeldRun, InstallRun
from ps_protocol.vocabulary import Incarnation, PserverIndex, Round
from services.runtime.checkpoints import COORDINATOR_FOLDER, read_manifest, read_shard_file
from services.runtime.logs import get_logger
from services.runtime.storage import (
    CheckpointStorage,
    DamagedFile,
    LocalStorage,
    lock_folder,
    open_checkpoint_storage,
    read_boot,
    seal,
    unseal,
    write_file,
)

from ..shard.shard import Shard
from ..shard.shard_state import History, ShardState, reslice
from .storage import Ranges, Restored, RunStorage, read_shard

log = get_logger()

IDENTITY = "identity.json"
_FOLDER = re.compile(r"pserver-(\d+)(?:-([1-9]\d*))?")


class FolderTaken(GradpostError):  # noqa: N818 - as all of its kind
    """Another process has locked this folder."""


class Identity(Message):
    """The incarnation of the pserver that wrote the file, the boot of its machine, and its run."""

    incarnation: Incarnation = 0
    boot: str = ""
    run: InstallRun | None = None


def folder_path(state_dir: Path, index: PserverIndex, copy: int) -> Path:
    """Return the path of a folder of this index. A pserver begins with copy 0, standbys with the others.

    >>> [folder_path(Path("state"), 0, copy).name for copy in (0, 1)]
    ['pserver-0', 'pserver-0-1']
    """
    return state_dir / (f"pserver-{index}-{copy}" if copy else f"pserver-{index}")


def list_folders(state_dir: Path) -> list[tuple[PserverIndex, int]]:
    """Return index and copy of each folder in order."""
    names = [_FOLDER.fullmatch(path.name) for path in state_dir.glob("pserver-*")]
    return sorted((int(found[1]), int(found[2] or 0)) for found in names if found)


def read_identity(path: Path) -> Identity:
    """Return the identity in a folder, which another process may have locked. Raises DamagedFile, UnsupportedFormat."""
    path = path / IDENTITY
    try:
        return unseal(path.read_bytes(), Identity, str(path))
    except FileNotFoundError:
        return Identity()
    except DamagedFile as error:
        raise DamagedFile(f"{error}; delete this file to continue the run from the newest checkpoint") from None


def rank_copies(state_dir: Path, index: PserverIndex) -> list[tuple[Incarnation, int]]:
    """Return incarnation and copy of each folder of this index, the newest incarnation first. Raises DamagedFile."""
    copies = [copy for found, copy in list_folders(state_dir) if found == index]
    ranked = [(read_identity(folder_path(state_dir, index, copy)).incarnation, copy) for copy in copies]
    return sorted(ranked, key=lambda one: (-one[0], one[1]))


class StateFolder:
    """A folder that is locked while this object is open. Raises FolderTaken, and OSError if the disk cannot be used."""

    def __init__(self, state_dir: Path, index: PserverIndex, copy: int = 0) -> None:
        self.index = index
        self.path = folder_path(state_dir, index, copy)
        lock = lock_folder(self.path)
        if lock is None:
            raise FolderTaken(
                f"{self.path} is in use by another process; start this pserver with another "
                "GRADPOST_PSERVER_INDEX or GRADPOST_STATE_DIR",
                copy=copy,
            )
        self._lock = lock
        try:
            self.identity = read_identity(self.path)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        run = self.identity.run.run if self.identity.run else "no run"
        return f"<StateFolder {self.path} [incarnation {self.identity.incarnation} | {run}]>"

    @property
    def log_path(self) -> Path:
        """The folder of the run's log."""
        return self.path / "log"

    def write_identity(self, incarnation: Incarnation, run: InstallRun | None) -> None:
        """Persist the identity of this process. Raises FolderTaken if a later incarnation has taken the folder."""
        if read_identity(self.path).incarnation > incarnation:
            raise FolderTaken(f"{self.path} belongs to a later incarnation of pserver {self.index}")
        identity = Identity(incarnation=incarnation, boot=read_boot(), run=run)
        write_file(self.path / IDENTITY, [seal(identity)])
        self.identity = identity

    def clear(self) -> None:
        """Delete the run of another process, and then its log, before a standby uses the folder. Raises OSError."""
        (self.path / IDENTITY).unlink(missing_ok=True)
        self.identity = Identity()
        self.delete_log()

    def delete_log(self) -> None:
        """Delete the log of an ended run. Raises OSError, since remaining files would be read as the next run's."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.log_path)

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)


def open_folder(state_dir: Path, index: PserverIndex | None) -> StateFolder | None:
    """Return the folder of this index with the newest incarnation.

    Without an index it is that of the first index whose folder is not locked; None without such a folder. Raises
    FolderTaken if the index is given and another process has locked its folder. A restarted pserver opens the folder of
    its own incarnation although a promoted standby has locked a newer one. It does not open the folder of a standby
    beside that of a living pserver, and opens a new one beside a standby that has locked the first.
    """
    if index is None:
        for found in sorted({found for found, _ in list_folders(state_dir)}):
            with suppress(FolderTaken):
                return open_folder(state_dir, found)
        return None
    taken: FolderTaken | None = None
    copies = rank_copies(state_dir, index)
    for incarnation, copy in copies:
        if taken is not None and incarnation == 0:
            break
        try:
            return StateFolder(state_dir, index, copy)
        except FolderTaken as error:
            if incarnation or read_identity(folder_path(state_dir, index, copy)).run is None:  # else a replica
                taken = error
    is_new = not folder_path(state_dir, index, 0).exists()
    if taken is not None and not is_new:
        raise taken
    return StateFolder(state_dir, index, 0 if is_new else 1 + max(copy for _, copy in copies))


def open_standby_folder(state_dir: Path, index: PserverIndex, incarnation: Incarnation) -> StateFolder:
    """Return a folder for a standby of this incarnation of a pserver: the oldest unlocked one, or a new one.

    A folder of the same or a later incarnation is not taken: it belongs to the pserver itself, which may restart.
    """
    oldest: list[tuple[Incarnation, int]] = []
    copies = [copy for found, copy in list_folders(state_dir) if found == index]
    for copy in copies:
        with suppress(DamagedFile, UnsupportedFormat):
            oldest.append((read_identity(folder_path(state_dir, index, copy)).incarnation, copy))
    for found, copy in sorted(oldest):
        if found < incarnation and (found or copy):
            with suppress(FolderTaken):
                return StateFolder(state_dir, index, copy)
    copy = max(copies, default=0)
    while True:  # another process may take a number first
        copy += 1
        with suppress(FolderTaken):
            return StateFolder(state_dir, index, copy)


class Disk:
    """The disk of one pserver process. One thread at a time calls its methods, which block and may raise OSError."""

    def __init__(self, state_dir: Path, checkpoints: str | None = None) -> None:
        self.folder: StateFolder | None = None
        self.is_open = False  # else the contents of the folder are unknown
        self.held: HeldRun | None = None
        self._state_dir = state_dir
        self._place = None if checkpoints is None else open_checkpoint_storage(checkpoints)
        self._storage: RunStorage | None = None
        self._restored: Restored | None = None

    def find_place(self) -> CheckpointStorage | None:
        """Return the shared storage of checkpoints: by default in the state folder, if the coordinator has the same."""
        if self._place is None and (self._state_dir / COORDINATOR_FOLDER).is_dir():
            return LocalStorage(self._state_dir / "checkpoints")
        return self._place

    def measure_usage(self) -> tuple[int, int]:
        """Return the size and the free bytes of the file system; zeros if it cannot be measured."""
        folder = self._state_dir if self._state_dir.exists() else self._state_dir.parent
        try:
            total, _, free = shutil.disk_usage(folder)
        except OSError:
            return 0, 0
        return total, free

    @property
    def index(self) -> PserverIndex | None:
        """The index that the folder belongs to."""
        return None if self.folder is None else self.folder.index

    @property
    def previous_incarnation(self) -> Incarnation:
        """The newest incarnation that has written to the folder; 0 if none has."""
        return 0 if self.folder is None else self.folder.identity.incarnation

    def open(self, index: PserverIndex | None) -> None:
        """Lock the folder of this index, or any free one, and restore the run in it. Raises FolderTaken.

        Called again, it restores again; nothing else may use the disk then.
        """
        if self.folder is None:
            self.folder = open_folder(self._state_dir, index)
        self._close_held()  # frees its shard before the next one is allocated
        if self.folder is not None and (install := self.folder.identity.run) is not None:
            storage = RunStorage(install, self.folder.index, self.folder.log_path)
            if (restored := storage.restore()) is None:
                log.warning("no snapshot of the run can be restored", run=install.run)
            else:
                has_rebooted = self.folder.identity.boot != read_boot()
                self._hold(storage, restored, has_rebooted=has_rebooted)
        self.is_open = True

    def _hold(self, storage: RunStorage, restored: Restored, *, has_rebooted: bool = False) -> None:
        self._storage, self._restored = storage, restored
        self.held = storage.describe_held(restored, has_rebooted=has_rebooted)

    def holds(self, run: str) -> bool:
        """Return whether this run was restored from the folder, and is not served yet."""
        return self.held is not None and self.held.run == run

    def find_restorable(
        self, served: RunStorage | None, run: str, newest: Round | None, *, is_complete: bool
    ) -> Ranges:
        """Return the ranges of rounds of a run to which this pserver can go back: see `RunStorage.find_restorable`.

        `served` is the storage of the run, if it is served. If the folder does not lead to round `newest`, whose
        checkpoint `is_complete`, the shard in the shared storage is read.
        """
        storage = self._storage if served is None and self.holds(run) else served
        ranges = [] if storage is None else storage.find_restorable(newest)
        if newest is None or not is_complete or any(first <= newest <= last for first, last in ranges):
            return ranges
        return ranges if self._read_shared(run, newest) is None else [*ranges, (newest, newest)]

    def _read_shared(self, run: str, round_: Round) -> memoryview | None:
        """Return the shard in a complete checkpoint in the shared storage; None if it is missing or damaged."""
        place = self.find_place()
        try:
            manifest = None if place is None else read_manifest(place, run, round_)
            if place is None or manifest is None:
                return None
            [file] = (file for file in manifest.shards if file.pserver == self.index)
            return read_shard_file(place, run, file)
        except DamagedFile as error:
            log.warning("a checkpoint is damaged", round=round_, error=str(error))
            return None

    def write_incarnation(self, index: PserverIndex, incarnation: Incarnation) -> None:
        """Persist the identity of this process, in the folder of this index."""
        if self.folder is None or self.folder.index != index:
            if self.folder is not None:
                self._close_held()
                self.folder.close()
            self.folder = open_folder(self._state_dir, index)
        assert self.folder is not None
        self.folder.write_identity(incarnation, self.folder.identity.run)

    def has_free_folder(self, index: PserverIndex, incarnation: Incarnation) -> bool:
        """Return whether a standby's folder has this incarnation, no process has locked it, and it can be read.

        The folder without a number is left to the process with this index.
        """
        with suppress(FolderTaken, UnsupportedFormat, OSError):
            for found, copy in rank_copies(self._state_dir, index):
                if found == incarnation and copy:
                    StateFolder(self._state_dir, index, copy).close()
                    return True
        return False

    def close(self) -> None:
        """Close the log, and unlock the folder."""
        self._close_held()
        if self.folder is not None:
            self.folder.close()
        self.folder = None

    def begin_replica(
        self, install: InstallRun, index: PserverIndex, data: memoryview, restored: Restored
    ) -> RunStorage:
        """Write a copy of another process's shard, `data`, and begin a log behind it, in a folder of this process.

        `restored` is the shard in this copy, which must not change before this returns. The replica before is deleted.
        """
        self._close_held()
        if self.folder is None:
            self.folder = open_standby_folder(self._state_dir, index, install.incarnation)
        self.folder.clear()
        storage = RunStorage(install, index, self.folder.log_path)
        try:
            storage.begin_with_copy(restored, data)
            self.folder.write_identity(0, install)
        except BaseException:
            storage.close()
            raise
        self._storage = storage
        return storage

    def adopt_replica(self, restored: Restored) -> None:
        """Hold the run of the replica, whose shard has the newest logged update, like one that was restored."""
        assert self._storage is not None
        if restored.shard.published is not None:
            restored.shard.published.discard_deltas()
        self._hold(self._storage, restored)
        self.is_open = True

    def _close_held(self) -> None:
        if self._storage is not None:
            self._storage.close()  # the log may be that of a replica, promoted or not, whose run was never opened
        self.held = self._storage = self._restored = None
        self.is_open = False

    def open_run(self, install: InstallRun) -> tuple[RunStorage, Restored | None]:
        """Begin a run, or resume after round `install.restore`. Raises StorageFailed if that round is lost.

        After an error the folder has to be opened again, or this call repeated.
        """
        assert self.folder is not None
        storage, restored = self._storage, self._restored
        is_held = self.holds(install.run) and install.source is None
        if storage is None or restored is None or not is_held or restored.round != install.restore:
            del restored  # frees its shard before the next one is allocated
            self._close_held()
            storage, restored = self._open_other(self.folder, install)
        self.held = self._storage = self._restored = None
        try:
            if restored is not None:
                storage.resume(restored, install)
            self.folder.write_identity(self.folder.identity.incarnation, install)
        except BaseException:
            storage.close()
            self.is_open = False
            raise
        self.is_open = True
        return storage, restored

    def _open_other(self, folder: StateFolder, install: InstallRun) -> tuple[RunStorage, Restored | None]:
        """Return a new storage, and the shard with which the run begins or to which it goes back."""
        known, imported = folder.identity.run, None
        if install.source is not None:
            imported = self._restore_from(install, install.source)  # an error changes nothing
        if install.restore is None or install.source is not None or known is None or known.run != install.run:
            folder.delete_log()  # of another run, or of an abandoned attempt with other initial values
        storage = RunStorage(install, folder.index, folder.log_path)
        if install.restore is None or imported is not None:
            return storage, imported
        return storage, storage.restore(install.restore) or self._restore_shared(storage, install, install.restore)

    def _restore_shared(self, storage: RunStorage, install: InstallRun, round_: Round) -> Restored:
        """Return the shard in a complete checkpoint, and write it to the folder, which does not lead to this round."""
        assert self.folder is not None
        data = self._read_shared(install.run, round_)
        if data is None:
            raise StorageFailed(f"pserver {self.index} cannot restore round {round_} of run {install.run}")
        storage.write_snapshot(round_, [data])
        return read_shard(storage.plan, self.folder.index, data)

    def _restore_from(self, install: InstallRun, source: str) -> Restored:
        """Return this pserver's part of another run's checkpoint, whose plan may differ."""
        assert self.folder is not None
        assert install.restore is not None
        place = self.find_place()
        manifest = None if place is None else read_manifest(place, source, install.restore)
        if place is None or manifest is None:
            where = "without a shared storage; set GRADPOST_CHECKPOINTS" if place is None else f"in {place.url}"
            raise StorageFailed(f"there is no checkpoint of round {install.restore} of run {source} {where}")

        def read_shards() -> Iterator[tuple[PserverIndex, ShardState]]:
            for file in manifest.shards:
                shard_state, _ = ShardState.decode(read_shard_file(place, source, file))
                yield file.pserver, shard_state

        state = reslice(read_shards(), manifest.plan, install.plan, self.folder.index)
        shard = Shard(install.plan, self.folder.index)
        shard.load_state(state)
        return Restored(shard, History())
