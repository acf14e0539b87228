"""Where the processes of a host find each other: in the store that torchrun has for all of them.

Process 0 writes there where it listens. What an earlier life of it has written is there, too, for a moment: nobody
listens at that place any more, or not to this secret.
"""

from __future__ import annotations

import functools
import itertools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from .place import HostPlace

_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined] # not in its stubs
START_SECONDS = 1800.0  # as long as torch.distributed waits for everybody by default

_numbers = itertools.count()  # of the sessions of this process; the same one has the same number in all processes


class Meeting:
    """For one session. All methods block, for torchrun's store."""

    def __init__(self, place: HostPlace) -> None:
        self._key = f"gradpost/host {place.trainer}/session {next(_numbers)}"
        self._store = _reach_store()

    def tell(self, address: str) -> None:
        """Of process 0: say where it listens."""
        self._store.set(self._key, address)

    def find(self) -> str:
        """Where process 0 listens; nothing if it has not said so yet."""
        return str(self._store.get(self._key).decode()) if self._store.check([self._key]) else ""

    def store_for(self, address: str) -> Any:
        """A store for those who meet at this address alone."""
        return _PrefixStore(f"{self._key}/{address}", self._store)


@functools.cache
def _reach_store() -> Any:
    """Once for the life of the process: where the agents of torchrun have no store it is the first process's own."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
    return store
