"""Where checkpoints live: a folder on this machine, or any place that fsspec can reach (`s3://`, `gs://`, `memory://`).

On a local disk a file is whole or not there, which takes a temporary file, its fsync, a rename and the folder's fsync.
Elsewhere it appears when it is closed, as object stores have it.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from .failpoints import reach_failpoint

Buffer: TypeAlias = bytes | memoryview


class Place(ABC):
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


class LocalPlace(Place):
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


class RemotePlace(Place):
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


def open_place(url: str) -> Place:
    """The place that a path or an fsspec URL names. Raises ValueError or ImportError if fsspec cannot reach it."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalPlace(Path(url))
    return LocalPlace(Path(rest)) if scheme in ("file", "local") else RemotePlace(url)


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
