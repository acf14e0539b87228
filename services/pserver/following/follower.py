"""The follower of one pserver: it copies the shard, and applies each update that the leader logs.

    wait for a leader ──► its run ──► a copy of the shard ──► updates, without an end
                            ▲              ▲                     │ connection lost
                            ├──────────────┼─────────────────────┘
                            └──────────────┴── another attempt or incarnation, damage, a difference

The leader decides nothing here, and waits for nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import NoReturn

import httpx
import torch

from ps_protocol.errors import Conflict, GradpostError, NotReady, StalePserver, TryAgain, UnsupportedFormat
from ps_protocol.retry import choose_backoff
from ps_protocol.standbys import ServedRun, ShardDigests, StandbyAnswer
from ps_protocol.vocabulary import PserverIndex
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..durable.record_stream import End, Idle, Received, RecordParser
from ..durable.records import Record
from .lag import Lag
from .leader import Leader
from .metrics import StandbyMetrics
from .replica import Replica

log = get_logger()

COMPARED_UPDATES = 1000  # between two comparisons of digests
IDLE_COMPARISON_SECONDS = 10.0  # between two comparisons while updates are rare
IDLE_SHARE = 0.01  # of the time, at most, that such comparisons take
STEADY_SECONDS = 5.0  # after which a stream counts as working, so that the next failure is the first one

# The leader and this process cannot work together, so that trying again would not help.
REFUSALS = frozenset({"no_update_log", "replica_mismatch", "unsupported_format"})
# The replica cannot be continued.
_BROKEN = frozenset({"updates_gone", "diverged", "future_round", "malformed_frame"})


class Follower:
    """The replica of one pserver's shard, and the loop that keeps it up to date. Lives on the event loop."""

    def __init__(
        self, index: PserverIndex, http: httpx.AsyncClient, compute: ComputeExecutor, metrics: StandbyMetrics
    ) -> None:
        self.index = index
        self.replica: Replica | None = None
        self.leader: StandbyAnswer | None = None  # the newest one that the coordinator named
        self.lag = Lag()
        self._http = http
        self._compute = compute
        self._metrics = metrics
        self._is_named = asyncio.Event()  # a leader is known
        self._expected: ShardDigests | None = None  # those of the leader, for a round that comes
        self._num_unchecked = 0
        self._compared_at = -IDLE_COMPARISON_SECONDS
        self._comparison_seconds = 0.0
        self._logged = ""
        metrics.round.set_function(lambda: self.replica.round if self.replica else 0)
        metrics.lag_rounds.set_function(lambda: self.lag.rounds)
        metrics.lag_bytes.set_function(lambda: self.lag.num_bytes)
        metrics.lag_seconds.set_function(lambda: self.lag.seconds(asyncio.get_running_loop().time()))

    @property
    def run(self) -> Replica:
        """The replica. Raises NotReady without one."""
        if self.replica is None:
            text = f"this standby has no replica of pserver {self.index} yet"
            raise NotReady(text, waiting_for=f"a copy of the shard of pserver {self.index}")
        return self.replica

    def note_answer(self, answer: StandbyAnswer) -> None:
        """Note the leader that the coordinator names, and its newest round. Without a leader the last one stays."""
        if answer.leader is None:
            return
        self.leader = answer
        self._is_named.set()
        replica = self.replica
        if replica is not None and (answer.run, answer.attempt) == (replica.installed.run, replica.installed.attempt):
            self.lag.note_leader(answer.round, asyncio.get_running_loop().time())

    async def follow(self) -> NoReturn:
        """Follow the leader until cancelled. Raises an error whose code is one of `REFUSALS`."""
        loop, num_failures = asyncio.get_running_loop(), 0
        while True:
            await self._is_named.wait()
            began = loop.time()
            try:
                await self._follow_leader()
            except (httpx.TransportError, ValueError, GradpostError) as error:
                self._handle_failure(error)
            num_failures = 1 if loop.time() - began > STEADY_SECONDS else num_failures + 1
            await asyncio.sleep(choose_backoff(num_failures))

    def _handle_failure(self, error: Exception) -> None:
        if isinstance(error, GradpostError) and error.code in REFUSALS:
            raise error
        if isinstance(error, GradpostError) and error.code in _BROKEN:
            self._discard_replica(error)
        text = f"{type(error).__name__}: {error}"
        if text != self._logged:
            self._logged = text
            log.info("not following", pserver=self.index, reason=text)

    def _discard_replica(self, reason: Exception) -> None:
        replica, self.replica = self.replica, None
        self._expected = None
        if replica is not None:
            log.warning("the replica is discarded; it begins with another copy", round=replica.round)
            replica.end(reason)

    # ------------------------------------------------------------------ the leader

    async def _follow_leader(self) -> None:
        """Follow the newest leader until its stream ends or the coordinator names another one."""
        named = self.leader
        assert named is not None
        assert named.leader is not None
        leader = Leader(named.leader, self._http)
        served = await leader.read_run()
        if served.installed.incarnation != named.incarnation:
            text = f"pserver {self.index} at {named.leader} is not the incarnation that the coordinator named"
            raise StalePserver(text, expected=named.incarnation, actual=served.installed.incarnation)
        check_software(served)
        if self.replica is not None and self.replica.continues(served.installed):
            self.replica.installed = served.installed
        else:
            await self._copy_shard(leader, served)
        await self._apply_updates(leader, named)

    async def _copy_shard(self, leader: Leader, served: ServedRun) -> None:
        installed = served.installed
        self._discard_replica(StalePserver(f"the standby begins with another copy of pserver {self.index}"))
        data = await leader.read_copy(installed.run, installed.attempt)
        replica = await self._compute.run(Replica.from_copy, installed, self.index, data, self._compute)
        self._metrics.copies.inc()
        self._num_unchecked = 0
        self.lag.reset(replica.round)
        self.replica = replica
        log.info("replica copied", pserver=self.index, run=installed.run, round=replica.round, bytes=len(data))

    async def _apply_updates(self, leader: Leader, named: StandbyAnswer) -> NoReturn:
        """Apply each update while the next one, and no more, is received."""
        replica = self.run
        parser = RecordParser(replica.max_record_bytes, replica.chain)
        handling: asyncio.Task[None] | None = None
        try:
            async with aclosing(leader.read_updates(replica)) as parts:
                async for part in parts:
                    for received in parser.feed(part):
                        if handling is not None:
                            await handling
                        handling = asyncio.create_task(self._handle_record(received, replica, leader))
                    self._check_leader(named)
        except asyncio.CancelledError:
            if handling is not None:
                handling.cancel()
            raise
        finally:
            if handling is not None:
                await handling
        raise TryAgain(f"the stream of pserver {self.index} has ended")

    def _check_leader(self, named: StandbyAnswer) -> None:
        newest = self.leader
        assert newest is not None
        if (newest.leader, newest.incarnation) != (named.leader, named.incarnation):
            raise StalePserver(f"pserver {self.index} has another incarnation now", current=newest.incarnation)

    async def _handle_record(self, received: Received, replica: Replica, leader: Leader) -> None:
        if isinstance(received, End):
            raise received.reason
        now = asyncio.get_running_loop().time()
        if isinstance(received, Idle):
            self._logged = ""
            self.lag.note_leader(received.round, now)
        else:
            await self._apply(received, replica)
        await self._compare_if_due(replica, leader, now, is_idle=isinstance(received, Idle))

    async def _apply(self, record: Record, replica: Replica) -> None:
        try:
            await replica.apply(record)
        except UnsupportedFormat:
            raise
        except Exception as error:
            self._discard_replica(error)
            if isinstance(error, GradpostError):
                raise
            log.exception("an update cannot be applied", round=replica.round)
            raise TryAgain(f"an update of pserver {self.index} cannot be applied: {error}") from error
        replica.chain = record.chain
        self._num_unchecked += 1
        self._metrics.updates.inc()
        self.lag.note_applied(replica.round, record.end - record.begin)

    # ------------------------------------------------------------------ comparison

    async def _compare_if_due(self, replica: Replica, leader: Leader, now: float, *, is_idle: bool) -> None:
        """Compare the replica with the leader, which returns the digests of its newest round.

        No update is applied meanwhile, so that the replica is not beyond that round.
        """
        if self._expected is None and self._is_due(now, is_idle=is_idle):
            self._compared_at, self._num_unchecked = now, 1  # after an error the next one is due as late
            try:
                self._expected = await leader.read_digests(replica)
            except TryAgain:
                return  # the leader is busy
            self._comparison_seconds = asyncio.get_running_loop().time() - now
            self._num_unchecked = 0
        if self._expected is not None and self._expected.round <= replica.round:
            await self._compare(replica, self._expected)

    def _is_due(self, now: float, *, is_idle: bool) -> bool:
        if not is_idle:
            return self._num_unchecked >= COMPARED_UPDATES
        pause = max(IDLE_COMPARISON_SECONDS, self._comparison_seconds / IDLE_SHARE)
        return self._num_unchecked > 0 and now - self._compared_at >= pause

    async def _compare(self, replica: Replica, expected: ShardDigests) -> None:
        self._expected = None
        if expected.round != replica.round:
            return
        self._metrics.comparisons.inc()
        name = await replica.find_difference(expected.digests)
        if name is None:
            return
        self._metrics.differences.inc()
        log.error("the replica differs from its leader", pserver=self.index, block=name, round=replica.round)
        text = f"{name!r} of the replica differs from that of pserver {self.index} after round {replica.round}"
        raise Conflict(text, code="diverged", current=replica.round)


def check_software(served: ServedRun) -> None:
    """Raise Conflict (`replica_mismatch`) if this process might compute other bits than the leader."""
    expected = f"torch {served.torch}, {served.cpu}"
    actual = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    if actual != expected:
        text = "this process cannot follow the pserver, because it might compute other bits; use the same torch and CPU"
        raise Conflict(text, code="replica_mismatch", expected=expected, actual=actual)
