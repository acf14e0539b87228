"""Collectives of torch.distributed between the processes of a host, or the trainers of a ring, and how these meet.

They run in process groups of our own, so that a script's own collectives may come in between. Every collective has a
time-out. Nothing that arrives is unpickled.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from ps_config.hosts import authority, split_port
from ps_protocol.errors import Ended, GradpostError
from ps_protocol.vocabulary import Rank

from ..client.run_client import RunClient

FIRST_PAUSE_SECONDS = 0.0001  # between two checks of a collective; later ones are longer
MAX_PAUSE_SECONDS = 0.001
NEWS_SECONDS = 5.0  # beyond a lease, until the coordinator names the lost trainer
NEWS_PAUSE_SECONDS = 0.05
DONE_TIMEOUT = timedelta(days=1)  # a trainer without batches waits for whatever the others do between two rounds


class Collectives:
    """Collectives of one process group, in the same order in each process. Used by one thread at a time."""

    def __init__(
        self,
        group: Any,
        timeout: timedelta,
        on_broken: Callable[[str], GradpostError],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Use a group whose collectives take at most `timeout`. A process alone has none, and exchanges nothing.

        `on_broken` returns the error for a collective that has failed, from torch's reason. `check` is called during
        waits, and ends them with the error that it raises.
        """
        self.timeout = timeout  # of the collectives that begin from now on
        self._group = group
        self._on_broken = on_broken
        self._check = check
        self._begun: list[Any] = []  # works, in order; they keep their tensors alive
        self._broken: RuntimeError | None = None

    def all_reduce(self, tensor: Tensor) -> None:
        """Begin to replace a contiguous tensor by the sum of all processes. It must not change until `finish`."""
        self._begin(tensor, dist.AllreduceOptions(), "allreduce")

    def reduce(self, tensor: Tensor) -> None:
        """Begin to sum a contiguous tensor into that of process 0. The others' tensors are undefined afterwards."""
        self._begin(tensor, dist.ReduceOptions(), "reduce")

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Begin to replace a contiguous tensor by that of process `source`. It must not change until `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._begin(tensor, options, "broadcast")

    def _begin(self, tensor: Tensor, options: Any, name: str) -> None:
        if self._broken is None and self._group is not None:
            options.timeout = self.timeout
            try:
                self._begun.append(getattr(self._group, name)([tensor], options))
            except RuntimeError as error:  # in the middle of a backward pass; `finish` reports it
                self._broken = error

    def finish(self) -> None:
        """Wait for all collectives that were begun; their tensors may change again.

        Raises the error of a broken group, or of `check`. An error or an interrupt closes the group.
        """
        try:
            if self._broken is not None:
                raise self._broken
            for work in self._begun:
                pause = FIRST_PAUSE_SECONDS
                while not work.is_completed():  # `work.wait` alone would delay an interrupt
                    self._check()
                    time.sleep(pause)
                    pause = min(2 * pause, MAX_PAUSE_SECONDS)
                work.wait()  # raises what went wrong; on an accelerator, what is computed from now on comes after it
        except RuntimeError as error:
            self._broken = error
            self.close()
            raise self._on_broken(str(error).partition("\n")[0]) from error
        except BaseException:
            self.close()
            raise
        self._begun.clear()

    def exchange(self, facts: object, source: int = 0) -> Any:
        """Return the facts of process `source`, which travel as JSON. Blocks for the process."""
        text = bytearray(json.dumps(facts, default=str).encode())
        size = torch.tensor([len(text)])
        self.broadcast(size, source)
        self.finish()
        is_source = self._group.rank() == source
        message = torch.frombuffer(text, dtype=torch.uint8) if is_source else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(message, source)
        self.finish()
        return json.loads(message.numpy().tobytes())

    def close(self) -> None:
        """Drop the group. An unfinished collective keeps it alive, because its destructor would wait."""
        if not all(work.is_completed() for work in self._begun):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._group, *self._begun)))
        self._begun.clear()
        self._broken = self._broken or RuntimeError("the connections are closed")
        self._group = None


def make_group(store: Any, rank: int, size: int, device: torch.device, host: str | None, timeout: timedelta) -> Any:
    """Return a new process group; torch.distributed's default group stays the script's. Blocks for all processes.

    `host` is the address that gloo listens on; None: gloo decides.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_default_device() if host is None else gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def choose_device(parameters: Mapping[str, Tensor]) -> torch.device:
    """Return the device on which gradients are summed: the parameters' CUDA device, else the CPU."""
    return next((p.device for p in parameters.values() if p.device.type == "cuda"), torch.device("cpu"))


# ---------------------------------------------------------------- what collectives carry

BYTES = 4  # of a float32 element
PIECE = 1 << 16  # elements that are squared at once, in memory that an allocator keeps
PART_BYTES = 32 * 1024 * 1024  # the most bytes of one broadcast
ALIGNMENT_BYTES = 16  # of each tensor in a broadcast, for any dtype
FACTS = 4  # of each rank


class FlatBucket:
    """The gradients of several parameters in one flat tensor, last layers first."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Allocate the memory; `sizes` are the numbers of elements by parameter name."""
        self.flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=device)  # (sum of sizes,)
        parts = torch.split(self.flat, list(sizes.values()))
        self.parts = dict(zip(sizes, parts, strict=True))  # name -> (size,) float32

    def fill(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy flat gradients of any dtype into the bucket, and zeros for parameters without one."""
        for name, part in self.parts.items():
            if name in gradients:
                part.copy_(gradients[name])
            else:
                part.zero_()

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares of all elements, a float64 scalar on their device."""
        pieces = (piece.double() for piece in torch.split(self.flat, PIECE))
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()


def cut_buckets(parameters: Mapping[str, Tensor], bucket_bytes: int, device: torch.device) -> list[FlatBucket]:
    """Return buckets of about `bucket_bytes` for all parameters, the last ones first.

    A parameter is never cut: one that is larger has a bucket of its own.

    >>> shapes = {"a": torch.empty(10), "b": torch.empty(2, 5), "c": torch.empty(10)}
    >>> [list(bucket.parts) for bucket in cut_buckets(shapes, 80, torch.device("cpu"))]
    [['c', 'b'], ['a']]
    """
    groups: list[dict[str, int]] = [{}]
    for name, parameter in reversed(list(parameters.items())):
        if groups[-1] and BYTES * (sum(groups[-1].values()) + parameter.numel()) > bucket_bytes:
            groups.append({})
        groups[-1][name] = parameter.numel()
    return [FlatBucket(group, device) for group in groups if group]


class BroadcastBuffer:
    """A packed copy, on one device, of tensors of any dtype and device, whose shapes and dtypes stay."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._parts = torch.split(flat, PART_BYTES)
        self._views = {
            name: memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), memory in zip(tensors.items(), torch.split(flat, sizes), strict=True)
        }

    @torch.no_grad()
    def broadcast(self, collectives: Collectives, source: int, *, sends: bool) -> None:
        """Broadcast the tensors of process `source`, which alone `sends`. Blocks for all processes, which call it.

        The others find the values with `write_back`.
        """
        for name, view in self._views.items() if sends else ():
            view.copy_(self._tensors[name])
        for part in self._parts:
            collectives.broadcast(part, source)
        collectives.finish()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the received values to the tensors."""
        for name, view in self._views.items():
            self._tensors[name].copy_(view)


# ---------------------------------------------------------------- the facts of a round


@dataclass(frozen=True)
class Tally:
    """The reduced facts of all ranks, which are trainers of a ring or processes of a host, about a round."""

    present: list[str]  # parameters with a gradient on any rank
    nonfinite: list[Rank]  # ranks whose gradients hold NaN or infinity
    lowest: Rank | None  # the lowest rank that had a batch
    num_active: int  # ranks that had a batch; the mean is theirs
    has_same_terms: bool  # on all ranks that had a batch
    source: Rank | None  # the lowest rank that has written parameters on purpose: all continue from its values


class TallyVector:
    """A float32 vector with the number of gradients of each parameter, and four facts of each rank as in `fill`.

    Its sum lets all processes of a group decide alike about a round.
    """

    def __init__(self, names: Sequence[str], rank: Rank, size: int, device: torch.device) -> None:
        self._names = names
        self._rank, self._size = rank, size
        self.vector = torch.zeros(len(names) + FACTS * size, dtype=torch.float32, device=device)

    def fill(
        self,
        present: Collection[str],
        *,
        is_finite: bool = True,
        is_active: bool = True,
        terms: object = None,
        has_written: bool = False,
    ) -> None:
        """Fill the vector with the facts of this rank about the next round. An all_reduce sums it.

        `terms` are what must be the same on all ranks.
        """
        facts = [[0.0] * self._size for _ in range(FACTS)]
        values = (not is_finite, is_active, _digest(terms), has_written)
        for fact, value in zip(facts, values, strict=True):
            fact[self._rank] = float(value)
        counts = [float(name in present) for name in self._names]
        flat = [*counts, *(value for fact in facts for value in fact)]
        self.vector.copy_(torch.tensor(flat, dtype=torch.float32, device="cpu"))

    def read(self) -> Tally:
        """Return the facts of all ranks from the summed vector."""
        counts, of_ranks = torch.split(self.vector.cpu(), [len(self._names), FACTS * self._size])
        not_finite, active, digests, written = of_ranks.view(FACTS, self._size).tolist()
        return Tally(
            present=[name for name, count in zip(self._names, counts.tolist(), strict=True) if count > 0],
            nonfinite=[rank for rank, count in enumerate(not_finite) if count > 0],
            lowest=next((rank for rank, is_active in enumerate(active) if is_active), None),
            num_active=int(sum(active)),
            has_same_terms=len({digest for digest, is_active in zip(digests, active, strict=True) if is_active}) <= 1,
            source=next((rank for rank, has_written in enumerate(written) if has_written), None),
        )


def _digest(terms: object) -> int:
    """Return 24 bits that differ for other terms; a float32 holds them exactly."""
    return zlib.crc32(repr(terms).encode()) >> 8


# ---------------------------------------------------------------- the trainers of a ring


class Group:
    """The trainers of a ring, and their collectives. The run's failure ends all waits. Used by one thread at a time.

    A trainer without a cluster is alone in its group, which it does not open.
    """

    def __init__(self, client: RunClient, device: torch.device) -> None:
        """`device` is where gradients are summed: the CPU, or a CUDA device."""
        self._client = client
        self.device = device
        joined = client.joined
        self.rank, self.size = joined.rank, joined.world_size
        self._timeout = timedelta(seconds=joined.round_timeout_seconds)
        self._store: Any = None
        self.collectives = Collectives(None, self._timeout, self._explain)

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
        # The coordinator names a trainer that does not progress after one round time-out.
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
            time.sleep(NEWS_PAUSE_SECONDS)
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
