"""Storage of checkpoints and state: a local folder, or a file system of fsspec (`s3://`, `gs://`, `memory://`).

On a local disk a file is written atomically: a temporary file, its fsync, a rename and the folder's fsync. In an object
store a file appears when it is closed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import xxhash
from pydantic import ValidationError

from ps_protocol.errors import UnsupportedFormat
from ps_protocol.fields import Message

from .failpoints import reach_failpoint

Buffer: TypeAlias = bytes | memoryview

LOCK = "lock"
BOOT = Path("/proc/sys/kernel/random/boot_id")
CHUNK_BYTES = 1 << 20  # of a file that is copied

_MessageT = TypeVar("_MessageT", bound=Message)
_SEALED = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})","content":(.*)\}\n', re.DOTALL)


class CheckpointStorage(ABC):
    """A folder of files with relative names. Every method blocks on the disk or the network, and raises OSError."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write a file, and replace one of that name.

        On an error a local file is unchanged; elsewhere a part of the new one, without its digest, may remain.
        """

    def copy_file(self, path: Path, name: str) -> None:
        """Write a copy of a local file, which never changes, as `write` does."""
        self.write(name, _read_chunks(path))

    @abstractmethod
    def read(self, name: str) -> memoryview:
        """Return the bytes of a file, private to the caller and writable. Raises FileNotFoundError."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, without the folder's own; empty if it does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its content, if it exists."""


class LocalStorage(CheckpointStorage):
    """A folder on a disk of this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write a file: see `CheckpointStorage.write`."""
        write_file(self._folder / name, chunks)

    def copy_file(self, path: Path, name: str) -> None:
        """Link a file, if it is on the same file system, or copy it: see `CheckpointStorage.copy_file`."""
        link = self._folder / name
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # this process has published the same before
                link.hardlink_to(path)  # a name which no other process uses
            sync_folder(link.parent)
        except OSError:  # such as EXDEV, or a file system without links
            super().copy_file(path, name)

    def read(self, name: str) -> memoryview:
        """Read a file: see `CheckpointStorage.read`."""
        return read_file(self._folder / name)

    def list(self, folder: str) -> list[str]:
        """List a folder: see `CheckpointStorage.list`."""
        path = self._folder / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def delete(self, name: str) -> None:
        """Delete a file or folder: see `CheckpointStorage.delete`."""
        path = self._folder / name
        if not path.is_dir():
            path.unlink(missing_ok=True)
        while path.is_dir():
            with suppress(FileNotFoundError):  # if another process deletes a file in it meanwhile
                shutil.rmtree(path)


class RemoteStorage(CheckpointStorage):
    """A folder in a file system of fsspec."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from fsspec.core import url_to_fs  # takes 60 ms

        self._fs: Any
        self._fs, self._root = url_to_fs(url)

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Raise the exceptions of a file system's library as OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {error!r}") from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write a file: see `CheckpointStorage.write`."""
        path = self._path(name)
        with self._os_errors():
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

    def read(self, name: str) -> memoryview:
        """Read a file: see `CheckpointStorage.read`."""
        with self._os_errors():
            return memoryview(bytearray(self._fs.cat_file(self._path(name))))

    def list(self, folder: str) -> list[str]:
        """List a folder: see `CheckpointStorage.list`."""
        try:
            with self._os_errors():
                self._fs.invalidate_cache()  # other processes write there, too
                paths = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def delete(self, name: str) -> None:
        """Delete a file or folder: see `CheckpointStorage.delete`."""
        with suppress(FileNotFoundError), self._os_errors():
            self._fs.rm(self._path(name), recursive=True)


def open_checkpoint_storage(url: str) -> CheckpointStorage:
    """Return the storage of a path or an fsspec URL. Raises ValueError or ImportError if fsspec does not support it."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStorage(Path(url))
    return LocalStorage(Path(rest)) if scheme in ("file", "local") else RemoteStorage(url)


def write_file(path: Path, chunks: Iterable[Buffer]) -> None:
    """Write a file atomically and durably. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In containers all processes have the same number, and two of them may write the same file of shared storage.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
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
    """Make names in a folder durable: fsync of a file does not include its name."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_file(path: Path) -> memoryview:
    """Return a writable copy of the bytes of a file. Raises OSError.

    The file is not mapped: a read error would kill the process.
    """
    with path.open("rb", buffering=0) as file:
        data = memoryview(bytearray(os.fstat(file.fileno()).st_size))
        done = 0
        while done < len(data) and (got := file.readinto(data[done:])):
            done += got
    return data[:done]


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def digest_chunks(chunks: Iterable[Buffer]) -> xxhash.xxh3_128:
    """Return an XXH3-128 hash object of the concatenated chunks."""
    digest = xxhash.xxh3_128()
    for chunk in chunks:
        digest.update(chunk)
    return digest


_OTHER_VERSION = "{} was written by another version of Gradpost; nothing was changed. Start that version"


def check_format(found: str | None, known: int, name: object) -> None:
    """Raise UnsupportedFormat for a file or record whose format is not the one that this version writes."""
    if found != str(known):
        raise UnsupportedFormat(_OTHER_VERSION.format(name), expected=f"format {known}", actual=found)


class DamagedFile(OSError):  # noqa: N818 - the name says what happened
    """A required file is missing, or does not match its digest."""

    @classmethod
    def wrong_digest(cls, name: object) -> DamagedFile:
        """Return the error for a file of this name with another digest."""
        return cls(f"{name} is damaged: it does not have the digest that was written for it")


def seal(message: Message) -> bytes:
    """Return a JSON file with its digest, because a flipped bit would still be valid JSON with another number in it.

        {"xxh3_128":"1f0c…","content":{"run":"4f1c",…}}

    The digest is that of the content's bytes as they are in the file, which must not be reformatted.
    """
    content = message.model_dump_json().encode()
    return b'{"xxh3_128":"%s","content":%s}\n' % (xxhash.xxh3_128_hexdigest(content).encode(), content)


def unseal(data: bytes | memoryview, kind: type[_MessageT], name: str) -> _MessageT:
    """Return the message in a sealed file of this name. Raises DamagedFile, and UnsupportedFormat."""
    found = _SEALED.fullmatch(data)
    if found is None or xxhash.xxh3_128_hexdigest(found[2]).encode() != found[1]:
        raise DamagedFile.wrong_digest(name)
    try:
        return kind.model_validate_json(found[2])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UnsupportedFormat(_OTHER_VERSION.format(name), expected=first["msg"], actual=where) from None


def read_boot() -> str:
    """Return what names the current boot of this machine (proc_sys_kernel(5)); an empty text where nothing does."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def lock_folder(folder: Path) -> int | None:
    """Create and lock a folder until the returned descriptor is closed, or the process ends.

    Returns None if another process has locked it. A file named `lock` remains; children do not inherit the descriptor.
    Raises OSError if the disk cannot be used.
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
