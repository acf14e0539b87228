"""What trainers write down of their operations, a JSON line each, and how the lines of all of them are read.

A line is written before an operation begins and after it has ended, so that `kill -9` leaves beginnings without ends.
Times are those of the monotonic clock, which the processes of one machine share.
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
    """One life of one trainer. The kernel has each line once `write` returns."""

    def __init__(self, path: Path, **always: Any) -> None:
        self._file = path.open("ab", buffering=0)
        self._always = always

    def write(self, what: str, **facts: Any) -> None:
        """Write one record."""
        record = {"what": what, "at": time.monotonic(), **self._always, **facts}
        self._file.write(json.dumps(record).encode() + b"\n")


class Reader:
    """Follows the diaries in a folder while they are being written."""

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Record]:
        """What is new since the last time; a line that is not whole yet is left for the next."""
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
    """All records in the order of time."""
    return sorted(records, key=lambda record: record["at"])


def name_of(record: Record) -> str:
    """Who wrote it, in words."""
    return f"trainer {record['rank']} (life {record['life']})" if "rank" in record else "the campaign, in the end,"
