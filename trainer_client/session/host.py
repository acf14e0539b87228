"""The processes of a host under torchrun, which are one trainer. Process 0 leads: it alone is in the run.

They meet in torchrun's store and talk over process groups of torch.distributed. A process that ends breaks the
connections of the others, and torchrun ends them or restarts all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from ps_protocol.errors import Ended, GradpostError, error_from_problem
from ps_protocol.messages import TrainerJoined

from ..client.run_client import RunClient
from .collectives import Collectives, make_group
from .rendezvous import HostPlace, PrefixStore, Rendezvous

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
        self._rendezvous: Rendezvous

    def __repr__(self) -> str:
        return f"<Host [process {self.place.process} of {self.place.num_processes}]>"

    def join(self, join: Callable[[], TrainerJoined]) -> TrainerJoined:
        """Join the run with `join` in process 0, or wait until process 0 has. Raises the errors of `join`."""
        self._rendezvous = Rendezvous(self.place)
        if not self.is_leader:
            answer = self._rendezvous.wait_for("joined", 0, self._client.log)
            _raise_failure(answer)
            joined = TrainerJoined.model_validate(answer)
            self._client.coordinator.adopt_place(joined, self.place.process)
            return joined
        try:
            joined = join()
        except GradpostError as error:
            self._rendezvous.publish("joined", {"failure": error.to_problem()})
            raise
        self._rendezvous.publish("joined", joined.model_dump(mode="json"))
        return joined

    # ------------------------------------------------------------------ the groups

    def connect(self) -> None:
        """Connect with the other processes. Blocks for them, up to 30 minutes."""
        self._rendezvous.publish(f"process {self.place.process}", "")
        for process in range(self.place.num_processes):
            self._rendezvous.wait_for(f"process {process}", process, self._client.log)
        self.control = self._make_collectives("control", torch.device("cpu"))

    def connect_tensors(self, device: torch.device) -> None:
        """Connect with the other processes for tensors on this device, which has the same type in all of them."""
        self.tensors = self._make_collectives("tensors", device)

    def _make_collectives(self, name: str, device: torch.device) -> Collectives:
        place, timeout = self.place, timedelta(seconds=self._client.joined.round_timeout_seconds)
        try:
            store = PrefixStore(name, self._rendezvous.store)
            group = make_group(store, place.process, place.num_processes, device, LOOPBACK, timeout)
        except RuntimeError as error:
            raise _broken(str(error).partition("\n")[0]) from error
        collectives = Collectives(group, timeout, _broken)
        self._client.at_leave.append(collectives.close)
        return collectives

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
        _raise_failure(facts)
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


def _raise_failure(answer: Any) -> None:
    if "failure" in answer:
        raise error_from_problem(answer["failure"])


def _broken(reason: str) -> GradpostError:
    return Ended(
        f"another process of this host has ended, failed or hangs. See its log, and the message of torchrun ({reason})",
        code="host_broken",
    )
