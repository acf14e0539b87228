"""Where checkpoints live: a folder on this machine, or any place that fsspec can reach (`s3://`, `gs://`, `memory://`).

On a local disk a file is whole or not there, which takes a temporary file, its fsync, a rename and the folder's fsync.
Elsewhere it appears when it is closed, as object stores have it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import xxhash
from pydantic import ValidationError

from ps_protocol.fields import Message

from .failpoints import reach_failpoint

Buffer: TypeAlias = bytes | memoryview

LOCK = "lock"

_MessageT = TypeVar("_MessageT", bound=Message)
_SEALED = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})","content":(.*)\}\n', re.DOTALL)


class CheckpointStorage(ABC):
    """Names are relative, with slashes. Every method blocks on the disk or the network, and raises OSError."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write a file, in place of one of that name.

        On an error a local one stays as it was; elsewhere there may be a part of the new one, without its digest.
        """

    @abstractmethod
    def read(self, name: str) -> memoryview:
        """Return the bytes of a file, private to the caller and writable. Raises FileNotFoundError."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """Names of what is in a folder, without the folder's; nothing if there is none."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or a folder with what is in it, if it is there."""


class LocalStorage(CheckpointStorage):
    """A folder on a disk of this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """See Place."""
        write_file(self._folder / name, chunks)

    def read(self, name: str) -> memoryview:
        """See Place."""
        return read_file(self._folder / name)

    def list(self, folder: str) -> list[str]:
        """See Place."""
        path = self._folder / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def delete(self, name: str) -> None:
        """See Place."""
        path = self._folder / name
        if not path.is_dir():
            path.unlink(missing_ok=True)
        while path.is_dir():
            with suppress(FileNotFoundError):  # of a file in it that another process has deleted meanwhile
                shutil.rmtree(path)


class RemoteStorage(CheckpointStorage):
    """A folder in a file system of fsspec's."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from fsspec.core import url_to_fs  # takes 60 ms, for those who use one

        self._fs: Any
        self._fs, self._root = url_to_fs(url)

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Every file system raises what its library does; here it is OSError, as with any disk."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {error!r}") from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """See Place."""
        path = self._path(name)
        with self._os_errors():
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

    def read(self, name: str) -> memoryview:
        """See Place."""
        with self._os_errors():
            return memoryview(bytearray(self._fs.cat_file(self._path(name))))

    def list(self, folder: str) -> list[str]:
        """See Place."""
        try:
            with self._os_errors():
                self._fs.invalidate_cache()  # others write there, too
                paths = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def delete(self, name: str) -> None:
        """See Place."""
        with suppress(FileNotFoundError), self._os_errors():
            self._fs.rm(self._path(name), recursive=True)


def open_checkpoint_storage(url: str) -> CheckpointStorage:
    """The place that a path or an fsspec URL names. Raises ValueError or ImportError if fsspec cannot reach it."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStorage(Path(url))
    return LocalStorage(Path(rest)) if scheme in ("file", "local") else RemoteStorage(url)


def write_file(path: Path, chunks: Iterable[Buffer]) -> None:
    """Put a file on the disk so that it is there as a whole, whenever the machine stops. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        reach_failpoint("checkpoint.rename")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable: a file that was synced may still be lost with its name."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_file(path: Path) -> memoryview:
    """Return the bytes of a file as they are now, writable as torch wants them. Raises OSError.

    They are not mapped: a sector that cannot be read, or a file that is gone from a server, would end the process.
    """
    with path.open("rb", buffering=0) as file:
        data = memoryview(bytearray(os.fstat(file.fileno()).st_size))
        done = 0
        while done < len(data) and (got := file.readinto(data[done:])):
            done += got
    return data[:done]


class DamagedFile(OSError):  # noqa: N818 - the name says what happened
    """A file is missing where one must be, or does not have the digest that was written for it."""

    @classmethod
    def wrong_digest(cls, name: object) -> DamagedFile:
        """Return the error for a file of this name whose digest differs."""
        return cls(f"{name} is damaged: it does not have the digest that was written for it")


def seal(message: Message) -> bytes:
    """What is to be written to a file."""
    content = message.model_dump_json().encode()
    return b'{"xxh3_128":"%s","content":%s}\n' % (xxhash.xxh3_128_hexdigest(content).encode(), content)


def unseal(data: bytes | memoryview, kind: type[_MessageT], name: str) -> _MessageT:
    """What a file of this name says. Raises DamagedFile."""
    found = _SEALED.fullmatch(data)
    if found is None or xxhash.xxh3_128_hexdigest(found[2]).encode() != found[1]:
        raise DamagedFile.wrong_digest(name)
    try:
        return kind.model_validate_json(found[2])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedFile(f"{name} was written by another version: {where}: {first['msg']}") from None


def lock_folder(folder: Path) -> int | None:
    """Lock a folder, which is made if need be, until the returned descriptor is closed, or the process ends.

    None if another process has it. A file named `lock` is left in it; children do not inherit the descriptor. Raises
    OSError if the disk cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
