"""The pserver: its identity and the run that it serves, one after another."""

from __future__ import annotations

import secrets
from collections import deque

from ps_protocol.errors import BadModel, Conflict, GradpostError, NotReady, StalePserver, StaleRun
from ps_protocol.frames import FrameLimits
from ps_protocol.messages import InstallMembers, InstallRun, PserverHeartbeat, PserverRegistered, PserverState
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Incarnation, PserverIndex
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import bind_facts

from .async_run import AsyncRun
from .bodies import BufferPool
from .in_flight import InFlight
from .metrics import PserverMetrics
from .run import PserverRun
from .sync_run import SyncRun

MAX_ENDED_RUNS = 1000
FRAME_ROOM_BYTES = 1024  # what a frame needs beside the one block in it


class Pserver:
    """Who this process is (assigned by the coordinator) and what it holds. Lives on the event loop."""

    def __init__(
        self, compute: ComputeExecutor, metrics: PserverMetrics, limits: FrameLimits, in_flight: InFlight | None = None
    ) -> None:
        self.instance = secrets.token_hex(16)  # of the process, so that a registration can be retried
        self.index: PserverIndex | None = None
        self.incarnation: Incarnation | None = None
        self.pool = BufferPool()
        self.limits = limits
        self.in_flight = in_flight or InFlight(limits.max_body_bytes)
        self._compute = compute
        self._metrics = metrics
        self._run: PserverRun | None = None
        # The newest of this process, so that a late installation brings none of them back.
        self._ended_runs: deque[str] = deque(maxlen=MAX_ENDED_RUNS)
        metrics.staged_bytes.set_function(lambda: self.pool.used_bytes)
        metrics.in_flight_bytes.set_function(lambda: self.in_flight.num_bytes)
        metrics.pooled_bytes.set_function(lambda: self.pool.idle_bytes)
        metrics.round.set_function(lambda: self._run.round if self._run else 0)
        metrics.queued.set_function(lambda: self._run.num_queued if self._run else 0)
        metrics.missing.set_function(lambda: len(self.heartbeat().missing))

    @property
    def run(self) -> PserverRun:
        """The current run, or NotReady."""
        if self._run is None:
            raise NotReady("this pserver has no run yet", waiting_for="the cluster to be complete")
        return self._run

    async def registered(self, answer: PserverRegistered) -> None:
        """Take the identity that the coordinator gave; a run of an earlier identity is dropped."""
        if (self.index, self.incarnation) != (answer.index, answer.incarnation):
            self.index, self.incarnation = answer.index, answer.incarnation
            bind_facts(pserver=answer.index)
            identity = f"pserver {answer.index} incarnation {answer.incarnation}"
            await self._replace_run(None, StalePserver("this pserver was registered anew", current=identity))

    async def _replace_run(self, run: PserverRun | None, reason: GradpostError) -> None:
        """Whoever still sends to the old run or waits in it is told the reason, also in the middle of a body."""
        old, self._run = self._run, run
        bind_facts(run=run.install.run if run else None)
        self.pool.forget_idle()
        if old is not None:
            self._ended_runs.append(old.install.run)
            await old.end(reason)

    async def install_run(self, message: InstallRun) -> None:
        """Start serving a run; the same installation again changes nothing, except that newer members are taken."""
        if message.incarnation != self.incarnation or self.index is None:
            raise StalePserver(
                "this installation was meant for another life of this pserver",
                expected=self.incarnation, actual=message.incarnation,
            )  # fmt: skip
        current = self._run
        if current is not None and current.install.run == message.run:
            if current.install.plan != message.plan:
                raise Conflict("this run was installed with another plan")
            members = InstallMembers(run=message.run, number=message.number, members=message.members)
            await current.install_members(members)
            return
        if message.run in self._ended_runs:
            raise StaleRun("this run has ended here", current=current.install.run if current else None)
        self._check_size(SlicePlan.from_json(message.plan), self.index)  # before the shard takes memory
        make_run = AsyncRun if message.consistency.is_async else SyncRun
        run: PserverRun = make_run(message, self.index, self._compute, self._metrics)
        await self._replace_run(run, StaleRun("this pserver serves another run now", current=message.run))
        await run.publish_initial()

    def _check_size(self, plan: SlicePlan, index: PserverIndex) -> None:
        """Refuse a plan with something that no frame could bring here."""
        most = self.limits.max_body_bytes - FRAME_ROOM_BYTES
        items = [(block.name, plan.block_bytes(block)) for block in plan.shards[index]]
        items += [(spec.name, spec.num_bytes) for spec in plan.buffers if spec.pserver == index]
        for name, num_bytes in items:
            if num_bytes > most:
                raise BadModel(
                    f"{name!r} does not fit into one frame of pserver {index}; raise its GRADPOST_MAX_BODY_BYTES",
                    expected=f"<= {most} bytes",
                    actual=num_bytes,
                )

    async def install_members(self, message: InstallMembers) -> None:
        """Pass a change of members to the run it belongs to."""
        if self._run is not None:
            await self._run.install_members(message)

    def readiness(self) -> str | None:
        """What is missing before this process can serve, or None."""
        return "registration with the coordinator" if self.index is None else None

    def heartbeat(self) -> PserverHeartbeat:
        """What the coordinator is told regularly."""
        run = self._run
        return PserverHeartbeat(
            incarnation=self.incarnation or 0,
            run=run.install.run if run else None,
            round=run.round if run else 0,
            missing=tuple(run.missing) if run and run.waiting_seconds else (),
            waiting_seconds=run.waiting_seconds if run else 0.0,
        )

    async def state(self, *, with_digest: bool) -> PserverState:
        """A picture for inspection; the digest reads the whole shard and is made on request only."""
        run = self._run
        if run is None:
            return PserverState(
                index=self.index, incarnation=self.incarnation, run=None, round=0, members=(), missing=(),
                waiting_seconds=0, num_blocks=0, shard_bytes=0, pushed_bytes=0, pulled_bytes=0, transports=(),
                digest=None, failure=None,
            )  # fmt: skip
        return PserverState(
            index=self.index,
            incarnation=self.incarnation,
            run=run.install.run,
            round=run.round,
            members=tuple(sorted(run.members)),
            **run.describe_trainers(),
            missing=tuple(run.missing),
            waiting_seconds=run.waiting_seconds,
            num_blocks=len(run.plan.shards[run.index]),
            shard_bytes=run.plan.shard_bytes(run.index),
            pushed_bytes=run.pushed_bytes,
            pulled_bytes=run.pulled_bytes,
            transports=tuple(sorted(run.transports)),
            digest=await run.digest() if with_digest else None,
            failure=run.failure.to_problem() if run.failure else None,
        )
