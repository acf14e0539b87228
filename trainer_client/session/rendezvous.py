"""The place of a process among those that torchrun has started, and the store in which they find process 0.

Process 0 publishes its address there. For a moment the address of an earlier incarnation may still be there; nothing
listens at it, or not with this secret. https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ps_config.environment import SettingsError
from ps_protocol.vocabulary import Rank


@dataclass(frozen=True)
class HostPlace:
    """The place of one process, on a host that is a trainer with several of them."""

    rank: int  # among the processes of all hosts
    world_size: int
    process: int  # on this host; 0 leads
    num_processes: int
    trainer: Rank  # which trainer of the run the host is
    num_trainers: int


_VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "process": "LOCAL_RANK",
    "num_processes": "LOCAL_WORLD_SIZE",
    "trainer": "GROUP_RANK",
    "num_trainers": "GROUP_WORLD_SIZE",
}


def find_place(environ: Mapping[str, str]) -> HostPlace | None:
    """Return the place from torchrun's variables; None without torchrun, or with one process on each host.

    `gradpost up` sets LOCAL_RANK and LOCAL_WORLD_SIZE, too, for trainers that are one process each. Raises
    SettingsError if one of torchrun's variables is missing.

    >>> environ = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "3", "GROUP_WORLD_SIZE": "4"}
    >>> find_place({**environ, "RANK": "7", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"})
    HostPlace(rank=7, world_size=8, process=1, num_processes=2, trainer=3, num_trainers=4)
    >>> find_place(environ) is None
    True
    """
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    try:
        return HostPlace(**{field: int(environ[variable]) for field, variable in _VARIABLES.items()})
    except (KeyError, ValueError) as error:
        needed = ", ".join(_VARIABLES.values())
        raise SettingsError(
            f"torchrun sets {needed}, but one of these variables is missing or is not a number: {error}"
        ) from None


_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined] # not in its stubs
START_SECONDS = 1800.0  # the default of torch.distributed

_numbers = itertools.count()  # of the sessions of this process; the same one has the same number in all processes


class Rendezvous:
    """The entry of one session in torchrun's store. All methods block for the store."""

    def __init__(self, place: HostPlace) -> None:
        self._key = f"gradpost/host {place.trainer}/session {next(_numbers)}"
        self._store = _reach_store()

    def publish(self, address: str) -> None:
        """Publish the address of process 0."""
        self._store.set(self._key, address)

    def look_up(self) -> str:
        """Return the address of process 0; an empty string if it is not published yet."""
        return str(self._store.get(self._key).decode()) if self._store.check([self._key]) else ""

    def store_for(self, address: str) -> Any:
        """Return a store for the processes that have found this address."""
        return _PrefixStore(f"{self._key}/{address}", self._store)


@functools.cache
def _reach_store() -> Any:
    """Connect once in the life of the process: without an agent's store it is that of the first process."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
    return store
