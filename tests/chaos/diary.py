"""The diaries of trainers: a JSON line before and after each operation.

After `kill -9` a beginning has no end. Times are those of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Values = tuple[float, ...]  # of a block: counts of the ranks, sums of rounds of the ranks


class Diary:
    """The diary of one incarnation of one trainer. The kernel has each line once `write` returns."""

    def __init__(self, path: Path, **always: Any) -> None:
        self._file = path.open("ab", buffering=0)
        self._always = always

    def write(self, what: str, **facts: Any) -> None:
        """Write one record."""
        record = {"what": what, "at": time.monotonic(), **self._always, **facts}
        self._file.write(json.dumps(record).encode() + b"\n")


class Reader:
    """A reader of all diaries in a folder while they are being written."""

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Record]:
        """Return the new records. Incomplete lines are left for the next call."""
        new: list[Record] = []
        for path in sorted(self._folder.glob("trainer-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
                new += [json.loads(line) for line in whole.split(b"\n")]
        self.records += new
        return new


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return all records in the order of time."""
    return sorted(records, key=lambda record: record["at"])


def name_of(record: Record) -> str:
    """Return the name of the writer of a record."""
    return f"trainer {record['rank']} (life {record['life']})" if "rank" in record else "the campaign, in the end,"
