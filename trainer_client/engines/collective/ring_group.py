"""The trainers of a ring: their rendezvous and their process group. The run's failure ends all waits."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ps_config.hosts import authority, split_port
from ps_protocol.errors import Ended, GradpostError

from ...session.collectives import Collectives, make_group
from ...session.session import Session

NEWS_SECONDS = 5.0  # beyond a lease, until the coordinator names the lost trainer
PAUSE_SECONDS = 0.05
DONE_TIMEOUT = timedelta(days=1)  # a trainer without batches waits for whatever the others do between two rounds


class Group:
    """Collectives of all trainers, in the same order on each of them. Used by one thread at a time."""

    def __init__(self, session: Session, device: torch.device) -> None:
        """`device` is where gradients are summed: the CPU, or a CUDA device."""
        self._client = session.client
        self.device = device
        joined = self._client.joined
        self.rank, self.size = joined.rank, joined.world_size
        self._timeout = timedelta(seconds=joined.round_timeout_seconds)
        self._store: Any = None
        self.collectives: Collectives

    # ------------------------------------------------------------------ life

    def offer(self) -> str | None:
        """Open the rendezvous of the lowest rank, and return its address, which is declared with the model."""
        if self.rank != 0:
            return None
        self._store, address = open_store(address_towards(self._client.settings.coordinator), self._timeout)
        return address

    def open(self, rendezvous: str | None) -> None:
        """Connect with all other trainers. Blocks for them. Raises the run's error, Ended (`ring_broken`)."""
        assert rendezvous is not None, "rank 0 has declared the rendezvous"
        with self._client.coordinator.reporting_wait():
            try:
                group = self._make_group(rendezvous)
            except RuntimeError as error:
                raise self._explain(str(error).partition("\n")[0]) from error
        # The coordinator names a trainer that does not progress after one round time-out, and an early bucket waits
        # from the beginning of one trainer's backward.
        timeout = 2 * self._timeout + timedelta(seconds=self._client.joined.lease_seconds)
        self.collectives = Collectives(group, timeout, self._explain, self._client.coordinator.news.check_failure)
        self._client.at_leave.append(self.close)

    def _make_group(self, rendezvous: str) -> Any:
        host = None if os.environ.get("GLOO_SOCKET_IFNAME") else address_towards(self._client.settings.coordinator)
        store = self._store = self._store or join_store(rendezvous, self._timeout)
        return make_group(store, self.rank, self.size, self.device, host, self._timeout)

    def close(self) -> None:
        """Close the group."""
        self.collectives.close()
        self._store = None

    # ------------------------------------------------------------------ waits

    def wait(self) -> None:
        """Wait for all collectives that were begun. Blocks for the other trainers, and reports the wait.

        Raises the error that ended the run, or Ended (`ring_broken`).
        """
        with self._client.coordinator.reporting_wait():
            self.collectives.finish()

    def _explain(self, reason: str) -> GradpostError:
        """Return the error for a broken connection: the run's, once the coordinator has named the lost trainer."""
        limit = self._client.joined.lease_seconds + NEWS_SECONDS
        until = time.monotonic() + limit
        while time.monotonic() < until:
            self._client.coordinator.news.check_failure()
            time.sleep(PAUSE_SECONDS)
        return Ended(
            f"the connections to the other trainers broke, and no trainer was lost within {limit:g} s: {reason}",
            code="ring_broken",
        )


_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined] # not in its stubs


def address_towards(url: str) -> str:
    """Return the address of this machine from which it reaches a service, so that others reach it there. Sends nothing.

    Not its host name: in a container, or a network namespace, that may lead elsewhere. Raises OSError for an unknown
    name.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, target = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting it only makes the kernel pick the route
        probe.connect(target)
        return str(probe.getsockname()[0])


def open_store(host: str, patience: timedelta) -> tuple[Any, str]:
    """Return a new store on a free port of this address only, and its address for the others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = _TCPStore(
        host,
        port,
        is_master=True,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # which the store closes
    )
    return store, authority(host, port)


def join_store(rendezvous: str, patience: timedelta) -> Any:
    """Return the store of another trainer. Blocks for it, up to `patience`."""
    host, port = split_port(rendezvous)
    return _TCPStore(host, int(port), is_master=False, timeout=patience, wait_for_workers=False)
