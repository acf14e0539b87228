"""The trainers of a ring: their process group, and a vector from which all compute the same outcome of a round.

The run's failure ends all waits. The vector is reduced after the gradients.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ps_config.hosts import authority, split_port
from ps_protocol.errors import BadModel, Ended
from ps_protocol.vocabulary import Rank

from ...session.collectives import GROUP_TIMEOUT, Collectives, make_group, run_aside
from ...session.session import Session

T = TypeVar("T")

SPARE_SECONDS = 30.0  # beyond all other time-outs, which name who is to blame
NEWS_SECONDS = 5.0  # beyond a lease, until the coordinator names the lost trainer


class Group:
    """Collectives of all trainers, in the same order on each of them. Used by one thread at a time."""

    def __init__(self, session: Session, device: torch.device) -> None:
        """`device` is where gradients are summed: the CPU, or a CUDA device."""
        self._client, self._io = session.client, session.io
        self.device = device
        joined = self._client.joined
        self.rank, self.size = joined.rank, joined.world_size
        # An early bucket waits from the beginning of one trainer's backward to the others' last moment.
        self._limit = 2 * joined.round_timeout_seconds + joined.lease_seconds + SPARE_SECONDS
        self._store: Any = None
        self.collectives: Collectives

    # ------------------------------------------------------------------ life

    def offer(self) -> str | None:
        """Open the rendezvous of the lowest rank, and return its address, which is declared with the model."""
        if self.rank != 0:
            return None
        if _has_group(self.rank, self.size):
            return OWN_GROUP
        self._store, address = open_store(
            address_towards(self._client.settings.coordinator), timedelta(seconds=self._limit)
        )
        return address

    def open(self, rendezvous: str | None) -> None:
        """Connect with all other trainers. Blocks for them. Raises the run's error, BadModel, Ended (`ring_broken`)."""
        assert rendezvous is not None, "rank 0 has declared the rendezvous"
        if rendezvous == OWN_GROUP and not _has_group(self.rank, self.size):
            raise BadModel(
                "trainer 0 has called torch.distributed.init_process_group, but this trainer has not, or with "
                "another rank or world size. Call it on all trainers or on none",
                expected=f"rank {self.rank} of {self.size}",
            )
        work = run_aside(lambda: self._make_group(rendezvous))
        self.collectives = Collectives(self._io.run(self._client.coordinator.guard(self._wait(work))))
        self._client.at_leave.append(self.close)

    def _make_group(self, rendezvous: str) -> Any:
        if rendezvous == OWN_GROUP:  # a group beside the script's own, whose collectives may come in between
            return dist.new_group(timeout=GROUP_TIMEOUT)
        host = None if os.environ.get("GLOO_SOCKET_IFNAME") else address_towards(self._client.settings.coordinator)
        store = self._store = self._store or join_store(rendezvous, timedelta(seconds=self._limit))
        return make_group(store, self.rank, self.size, self.device, host)

    def close(self) -> None:
        """Close the group."""
        self.collectives.close()
        self._store = None

    # ------------------------------------------------------------------ waits

    def wait(self, *, has_limit: bool = True) -> None:
        """Wait for all collectives that were begun. Blocks for the other trainers, without limit if they may be done.

        Raises the error that ended the run, or Ended (`ring_broken`).
        """
        self._io.run(self._client.coordinator.guard(self._wait(self.collectives.finish(), has_limit=has_limit)))
        self.collectives.release()

    async def _wait(self, work: Coroutine[Any, Any, T], *, has_limit: bool = True) -> T:
        """Report the wait with heartbeats; after a broken connection, wait until the coordinator names the trainer."""
        coordinator, loop = self._client.coordinator, asyncio.get_running_loop()
        with coordinator.reporting_wait():
            try:
                async with asyncio.timeout(self._limit if has_limit else None):
                    return await work
            except (RuntimeError, TimeoutError) as error:
                limit = self._client.joined.lease_seconds + NEWS_SECONDS
                until = loop.time() + limit
                while (left := until - loop.time()) > 0:
                    await coordinator.news.wait_for_heartbeat(left)  # they come as the run's failure, which ends this
                reason = str(error).partition("\n")[0] or f"no answer for {self._limit:g} s"
                raise Ended(
                    "the connections to the other trainers broke, and no trainer was lost within "
                    f"{limit:g} s: {reason}",
                    code="ring_broken",
                ) from error


@dataclass(frozen=True)
class Tally:
    """The reduced facts of all trainers about a round."""

    present: list[str]  # parameters with a gradient on any trainer
    nonfinite: list[Rank]  # trainers whose gradients hold NaN or infinity
    is_void: bool  # the gradients of a trainer are incomplete; all send theirs again
    lowest: Rank | None  # the lowest rank that had a batch
    num_active: int  # trainers that had a batch; the mean is theirs
    has_same_numbers: bool  # in the optimizers and GradScalers of the trainers that had a batch
    source: Rank | None  # the lowest rank that has written parameters on purpose: all continue from its values


FACTS = 5  # of each rank


class TallyVector:
    """A float32 vector with the number of gradients of each parameter, and five facts of each rank as in `fill`."""

    def __init__(self, names: Sequence[str], rank: Rank, size: int, device: torch.device) -> None:
        self._names = names
        self._rank, self._size = rank, size
        self.vector = torch.zeros(len(names) + FACTS * size, dtype=torch.float32, device=device)

    def fill(
        self,
        present: Collection[str],
        *,
        is_finite: bool = True,
        is_void: bool = False,
        is_active: bool = True,
        numbers: int = 0,
        has_written: bool = False,
    ) -> None:
        """Fill the vector with the facts of this trainer about the next round. An all_reduce sums it."""
        facts = [[0.0] * self._size for _ in range(FACTS)]
        values = (not is_finite, is_void, is_active, numbers, has_written)
        for fact, value in zip(facts, values, strict=True):
            fact[self._rank] = float(value)
        counts = [float(name in present) for name in self._names]
        flat = [*counts, *(value for fact in facts for value in fact)]
        self.vector.copy_(torch.tensor(flat, dtype=torch.float32, device="cpu"))

    def read(self) -> Tally:
        """Return the facts of all trainers from the summed vector."""
        counts, of_ranks = torch.split(self.vector.cpu(), [len(self._names), FACTS * self._size])
        not_finite, void, active, digests, written = of_ranks.view(FACTS, self._size).tolist()
        return Tally(
            present=[name for name, count in zip(self._names, counts.tolist(), strict=True) if count > 0],
            nonfinite=[rank for rank, count in enumerate(not_finite) if count > 0],
            is_void=any(void),
            lowest=next((rank for rank, is_active in enumerate(active) if is_active), None),
            num_active=int(sum(active)),
            has_same_numbers=len({digest for digest, is_active in zip(digests, active, strict=True) if is_active}) <= 1,
            source=next((rank for rank, has_written in enumerate(written) if has_written), None),
        )


def _has_group(rank: int, size: int) -> bool:
    """Return True if the script has initialised torch.distributed with this rank and world size."""
    return dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, size)


_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined] # not in its stubs
OWN_GROUP = "torch.distributed"  # instead of an address: the group that the scripts have made already


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
