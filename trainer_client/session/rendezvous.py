"""The place of a process among those that torchrun has started, and torchrun's store, in which they find each other.

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from structlog.typing import FilteringBoundLogger
from torch.distributed.rendezvous import rendezvous

from ps_config.environment import SettingsError
from ps_protocol.errors import Ended
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
    attempt: str = ""  # of torchrun on this host to run the script


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
    >>> files = {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_ab/none_cd/attempt_0/1/error.json"}
    >>> find_place({**environ, **files, "RANK": "7", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}).attempt
    '/tmp/torchelastic_ab/none_cd/attempt_0'
    >>> find_place(environ) is None
    True
    """
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    try:
        numbers = {field: int(environ[variable]) for field, variable in _VARIABLES.items()}
    except (KeyError, ValueError) as error:
        needed = ", ".join(_VARIABLES.values())
        raise SettingsError(
            f"torchrun sets {needed}, but one of these variables is missing or is not a number: {error}"
        ) from None
    # Each attempt has a new folder for the logs of all its processes.
    return HostPlace(**numbers, attempt=str(Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent))


PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined] # not in its stubs
START_SECONDS = 1800.0  # the default of torch.distributed
LOG_SECONDS = 10.0  # a longer wait is logged
PAUSE_SECONDS = 0.05  # between two looks at the store

_numbers = itertools.count()  # of the sessions of this process; the same one has the same number in all processes


@contextlib.contextmanager
def _reporting_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise Ended(f"the store of torchrun did not answer: {reason}", code="host_broken") from error


class Rendezvous:
    """The entries of one session of a host in torchrun's store, as JSON. All methods raise Ended without the store."""

    @_reporting_store()
    def __init__(self, place: HostPlace) -> None:
        key = f"gradpost/host {place.trainer}/{place.attempt}/session {next(_numbers)}"
        self.store = PrefixStore(key, _reach_store())

    @_reporting_store()
    def publish(self, key: str, facts: object) -> None:
        """Set an entry."""
        self.store.set(key, json.dumps(facts, default=str))

    @_reporting_store()
    def wait_for(self, key: str, process: int, log: FilteringBoundLogger) -> Any:
        """Return an entry of a process. Blocks until it is set. Raises Ended after 30 minutes, too."""
        begun, was_logged = time.monotonic(), False
        while not self.store.check([key]):  # `get` would delay an interrupt
            waited = time.monotonic() - begun
            if waited > START_SECONDS:
                raise Ended(
                    f"process {process} of this host has not made the same call for {START_SECONDS:g} s. See its log",
                    code="host_broken",
                )
            if waited > LOG_SECONDS and not was_logged:
                log.info(f"waiting for process {process} of this host")
                was_logged = True
            time.sleep(PAUSE_SECONDS)
        return json.loads(self.store.get(key))


@functools.cache
def _reach_store() -> Any:
    """Connect once in the life of the process: without an agent's store it is that of the first process."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
    return store
