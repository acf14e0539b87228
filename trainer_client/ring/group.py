"""The trainers of a run as a process group of torch.distributed, in which nobody waits for ever.

What waits does so on the I/O loop, where the run's failure ends it: a collective of gloo or NCCL itself waits for a
process that is stopped, or a machine that is gone, as long as its time-out says.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ps_protocol.errors import BadModel, RingBroken

from ..session import Session
from .rendezvous import OWN_GROUP, address_towards, join_store, open_store

POLL_SECONDS = 0.0005  # between looks at an accelerator
SPARE_SECONDS = 30.0  # beyond all other time-outs, which name who is to blame
NEWS_SECONDS = 5.0  # beyond a lease, to hear who was lost


class Group:
    """Collectives of all trainers, in the same order on each of them. Used by one thread at a time."""

    def __init__(self, session: Session, device: torch.device) -> None:
        """`device` is where the tensors are that are added up: the processor's memory, or a CUDA device."""
        self._client, self._io = session.client, session.io
        self._device = device
        joined = self._client.joined
        self.rank, self.size = joined.rank, joined.world_size
        # An early bucket waits from the beginning of one trainer's backward to the others' last moment.
        limit = 2 * joined.round_timeout_seconds + joined.lease_seconds + SPARE_SECONDS
        self._patience = timedelta(seconds=limit)
        self._store: Any = None
        self._group: Any = None
        self._is_ours = True
        self._begun: list[Any] = []  # works that nobody has waited for
        self._broken: RuntimeError | None = None

    # ------------------------------------------------------------------ life

    def offer(self) -> str | None:
        """Of the lowest rank: where all are to meet, to be declared with the model."""
        if self.rank != 0:
            return None
        if _has_group(self.rank, self.size):
            return OWN_GROUP
        self._store, address = open_store(address_towards(self._client.settings.coordinator), self._patience)
        return address

    def open(self, rendezvous: str | None) -> None:
        """Connect with all others. Blocks for them; raises what ended the run, BadModel, RingBroken."""
        assert rendezvous is not None, "rank 0 has declared where to meet"
        if rendezvous == OWN_GROUP:
            if not _has_group(self.rank, self.size):
                raise BadModel(
                    "trainer 0 has called torch.distributed.init_process_group, and this one has not, or with another "
                    "rank or world size",
                    expected=f"rank {self.rank} of {self.size}",
                )
            self._group, self._is_ours = dist.group.WORLD, False
        else:
            self._io.run(self._client.membership.guard(self._wait(self._connect(rendezvous))))
        self._client.at_leave.append(self.close)

    async def _connect(self, rendezvous: str) -> None:
        def connect() -> Any:
            host = address_towards(self._client.settings.coordinator)
            store = self._store = self._store or join_store(rendezvous, self._patience)
            return _make_group(store, self.rank, self.size, self._device, host, self._patience)

        self._group = await _run_aside(connect)

    def close(self) -> None:
        """Let go of it. One in which something is still under way stays as it is: its end would wait for that."""
        if self._is_ours and not all(work.is_completed() for work in self._begun):
            _keep_for_ever(self._group, self._store)
        self._begun.clear()
        self._group = self._store = None

    # ------------------------------------------------------------------ collectives

    def add_up(self, tensor: Tensor) -> None:
        """Begin to replace a contiguous tensor by the sum of all trainers'. It must not change until `wait`."""
        self._begin(lambda: self._group.allreduce([tensor]))

    def spread(self, tensor: Tensor) -> None:
        """Begin to replace a contiguous tensor by that of rank 0. It must not change until `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._begin(lambda: self._group.broadcast([tensor], options))

    def _begin(self, begin: Callable[[], Any]) -> None:
        if self._broken is None:
            try:
                self._begun.append(begin())
            except RuntimeError as error:  # in the middle of a backward pass; `wait` says what it means
                self._broken = error

    def wait(self) -> None:
        """Wait for all that was begun. Blocks for the other trainers; raises what ended the run, or RingBroken."""
        self._io.run(self._client.membership.guard(self._wait(self._finish(self._begun))))
        for work in self._begun:
            work.wait()  # for an accelerator: what is computed from now on comes after it
        self._begun.clear()

    async def _finish(self, works: Sequence[Any]) -> None:
        if self._broken is not None:
            raise self._broken
        for work in works:
            await self._completion(work)
            work.wait()  # raises what went wrong

    async def _completion(self, work: Any) -> None:
        if self._device.type == "cuda":  # a future of NCCL's is done when the work has been queued
            while not work.is_completed():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(POLL_SECONDS)
            return
        loop = asyncio.get_running_loop()
        completed = asyncio.Event()

        def tell(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(completed.set)

        work.get_future().add_done_callback(tell)
        await completed.wait()

    async def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Heartbeats say since when. When a connection breaks, the coordinator has yet to notice whose."""
        membership, loop = self._client.membership, asyncio.get_running_loop()
        membership.waiting_since = loop.time()
        try:
            await work
        except RuntimeError as error:
            limit = self._client.joined.lease_seconds + NEWS_SECONDS
            until = loop.time() + limit
            while (left := until - loop.time()) > 0:
                await membership.news.wait(left)  # they come as the run's failure, which ends this
            reason = str(error).partition("\n")[0]
            text = f"the connections to the other trainers broke, and nobody was lost within {limit:g} s: {reason}"
            raise RingBroken(text) from error
        finally:
            membership.waiting_since = None


def _has_group(rank: int, size: int) -> bool:
    """Whether the script has initialised torch.distributed, as the same trainer of as many."""
    return dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, size)


def _make_group(store: Any, rank: int, size: int, device: torch.device, host: str, patience: timedelta) -> Any:
    """A group of our own, so that torch.distributed's one default group stays the script's. Blocks for all others."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if os.environ.get("GLOO_SOCKET_IFNAME"):  # the user knows better
        return dist.ProcessGroupGloo(store, rank, size, patience)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = patience
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


async def _run_aside(work: Callable[[], Any]) -> Any:
    """Run it on a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        found, error = None, None
        try:
            found = work()
        except Exception as problem:
            error = problem if isinstance(problem, RuntimeError) else RuntimeError(repr(problem))
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, found, error)

    def tell(found: Any, error: RuntimeError | None) -> None:
        if not result.done():
            result.set_result(found) if error is None else result.set_exception(error)

    threading.Thread(target=run, name="gradpost ring", daemon=True).start()
    return await result


def _keep_for_ever(*things: Any) -> None:
    """The end of a group waits for its collectives, and so would the end of the process, for one that is stopped."""

    def hold(_: Any) -> None:
        threading.Event().wait()

    threading.Thread(target=hold, args=(things,), name="gradpost ring", daemon=True).start()
