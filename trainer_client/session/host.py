"""The processes of a host under torchrun, which are one trainer. Process 0 leads: it alone is in the run.

They meet in torchrun's store and talk over process groups of torch.distributed. A process that ends breaks the
connections of the others, and torchrun ends them or restarts all.
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ps_config.environment import SettingsError
from ps_protocol.errors import Ended, GradpostError, error_from_problem
from ps_protocol.messages import TrainerJoined
from ps_protocol.vocabulary import Rank

from ..client.run_client import RunClient
from .collectives import Collectives, make_group


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


@functools.cache
def _reach_store() -> Any:
    """Connect once in the life of the process: without an agent's store it is that of the first process."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
    return store


LOOPBACK = "127.0.0.1"
RUN_TIMEOUT = timedelta(days=1)  # a paused run, or a lost trainer, lets process 0 wait for longer than a round


class Host:
    """The processes of this host, which make the same calls in the same order, and block for each other."""

    def __init__(self, place: HostPlace, client: RunClient) -> None:
        self.place = place
        self.is_leader = place.process == 0
        self.tensors: Collectives
        self.control: Collectives  # of facts, in host memory
        self._client = client
        self._store: Any

    def __repr__(self) -> str:
        return f"<Host [process {self.place.process} of {self.place.num_processes}]>"

    def join(self, join: Callable[[], TrainerJoined]) -> TrainerJoined:
        """Connect with the other processes, and join the run with `join` in process 0. Raises the errors of `join`.

        Blocks for the other processes, up to 30 minutes, and as long as `join`.
        """
        self._connect()
        if self.is_leader:
            with self.reporting_failure():
                joined = join()
            self.send(**joined.model_dump(mode="json"))
        else:
            joined = TrainerJoined.model_validate(self.receive())
            self._client.coordinator.adopt_place(joined, self.place.process)
        self._client.at_leave.append(self.control.close)
        self.control.timeout = timedelta(seconds=joined.round_timeout_seconds)
        return joined

    @_reporting_store()
    def _connect(self) -> None:
        key = f"gradpost/host {self.place.trainer}/{self.place.attempt}/session {next(_numbers)}"
        self._store = PrefixStore(key, _reach_store())
        self._store.set(f"process {self.place.process}", "")
        for process in range(self.place.num_processes):
            self._wait_for(process)
        self.control = self._make_collectives("control", torch.device("cpu"), timedelta(seconds=START_SECONDS))

    def _wait_for(self, process: int) -> None:
        """Wait until a process has made the same call. Raises Ended after 30 minutes."""
        begun, was_logged = time.monotonic(), False
        while not self._store.check([f"process {process}"]):  # `wait` would delay an interrupt
            waited = time.monotonic() - begun
            if waited > START_SECONDS:
                raise Ended(
                    f"process {process} of this host has not made the same call for {START_SECONDS:g} s. See its log",
                    code="host_broken",
                )
            if waited > LOG_SECONDS and not was_logged:
                self._client.log.info(f"waiting for process {process} of this host")
                was_logged = True
            time.sleep(PAUSE_SECONDS)

    def connect_tensors(self, device: torch.device) -> None:
        """Connect with the other processes for tensors on this device, which has the same type in all of them."""
        self.tensors = self._make_collectives("tensors", device, self.control.timeout)
        self._client.at_leave.append(self.tensors.close)

    def _make_collectives(self, name: str, device: torch.device, timeout: timedelta) -> Collectives:
        try:
            store = PrefixStore(name, self._store)
            group = make_group(store, self.place.process, self.place.num_processes, device, LOOPBACK, timeout)
        except RuntimeError as error:
            raise _broken(str(error).partition("\n")[0]) from error
        return Collectives(group, timeout, _broken)

    # ------------------------------------------------------------------ messages

    def gather(self, facts: object) -> list[Any]:
        """Return the facts of all processes. Blocks for them."""
        return [self.control.exchange(facts, process) for process in range(self.place.num_processes)]

    def send(self, **facts: Any) -> None:
        """Send facts from process 0 to the others, which are in `receive`."""
        self.control.exchange(facts)

    def receive(self) -> Any:
        """Return what process 0 sends. Raises its failure, and Ended. Blocks for the run, as process 0 does."""
        timeout, self.control.timeout = self.control.timeout, RUN_TIMEOUT
        facts = self.control.exchange(None)
        self.control.timeout = timeout
        if "failure" in facts:
            raise error_from_problem(facts["failure"])
        return facts

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Send an error of this block to the other processes, which are in `receive`."""
        try:
            yield
        except BaseException as error:
            reported = error if isinstance(error, GradpostError) else Ended(f"process 0 of this host: {error!r}")
            with contextlib.suppress(GradpostError):
                self.send(failure=reported.to_problem())
            raise


def _broken(reason: str) -> GradpostError:
    return Ended(
        f"another process of this host has ended, failed or hangs. See its log, and the message of torchrun ({reason})",
        code="host_broken",
    )
