"""Where the processes of a host find each other: in the store that torchrun has for all of them.

Process 0 writes there where it listens. What an earlier life of it has written is there, too, for a moment: nobody
listens at that place any more, or not to this secret.
"""

from __future__ import annotations

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
        patience = timedelta(seconds=START_SECONDS)
        self._store, _, _ = next(rendezvous("env://", timeout=patience))  # a new connection

    def tell(self, address: str) -> None:
        """Of process 0: say where it listens."""
        self._store.set(self._key, address)

    def find(self, seconds: float) -> str:
        """Where process 0 listens; nothing if it has not said so in time."""
        try:
            self._store.wait([self._key], timedelta(seconds=seconds))
        except RuntimeError:
            return ""
        return str(self._store.get(self._key).decode())

    def store_for(self, address: str) -> Any:
        """A store for those who meet at this address alone."""
        return _PrefixStore(f"{self._key}/{address}", self._store)
