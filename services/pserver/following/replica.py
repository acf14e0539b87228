"""The replica of a shard: a run that replays the updates of its leader instead of applying contributions.

Each update is in its own log before it is applied, so that its folder restores the same bits. Reads, snapshots and the
end are those of any run in the synchronous mode. Updates, and the copy that a replica begins with, are requested from
the leader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import httpx
import numpy as np
import torch
from typing_extensions import override

from ps_config.control_client import may_be_problem, raise_for_problem
from ps_http2.client_connection import SINK_EXTENSION
from ps_http2.stream import Sink
from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, StalePserver
from ps_protocol.membership import InstallRun
from ps_protocol.standbys import ServedRun
from ps_protocol.vocabulary import Incarnation, PserverIndex, Round

from ..durable.records import Record, parse_records
from ..durable.storage import Restored, RunStorage, read_shard, replay_update
from ..durable.update_log import MAX_READ_BYTES, LoggedUpdate
from ..run.rounds import Apply
from ..run.sync_run import SyncRun
from ..shard.shard import MASTER_BYTES
from ..shard.shard_state import ShardState

POLL_SECONDS = 0.1  # for which the leader waits for an update before it answers that there is none
SILENCE_SECONDS = 0.5  # of the leader while it owes an answer, or a part of it
RUN_SECONDS = 2.0
REPLY_SECONDS = 60.0  # for replies that the leader computes from its whole shard, after those of others
CONNECT_SECONDS = 5.0
SLACK_BYTES = 1 << 16  # of memory behind a body, whose end may be in another frame
MAX_TENSORS_OF_RECORD = 8  # a gradient and loaded optimizer state, all of the size of the shard
MAX_REPORTS = 1000  # of a lag, whose seconds are counted from the oldest one
MAX_METADATA_BYTES = 1 << 14  # of a block in a record, most of it its name, several times


def restore_copy(installed: InstallRun, index: PserverIndex, data: memoryview) -> Restored:
    """Return the shard in a copy. Its tensors may be views of `data`. Raises BadInput for the copy of another shard."""
    _, metadata = ShardState.decode(data)
    plan = installed.plan
    expected = {"run": installed.run, "attempt": str(installed.attempt), "pserver": str(index), "plan": plan.digest}
    actual = {key: metadata.get(key) for key in expected}
    if actual != expected:
        raise BadInput("the copy is of another shard", code="malformed_frame", expected=expected, actual=actual)
    return read_shard(plan, index, data)


class Replica(SyncRun):
    """The run of a pserver, as a standby repeats it. Only the follower lets it apply updates."""

    follows = True
    storage: RunStorage

    def prepare(self, restored: Restored | None) -> None:
        """Begin with the copy, which is complete."""
        super().prepare(restored)
        self.is_readable = True
        self.held: Round = self.round  # the newest update that is in memory, to be logged and applied
        self.held_chain = self.chain
        self.confirmed: Round = 0  # the newest update that the leader may count on
        self.has_failed_to_log = False  # the newest try: until one succeeds, only applied updates are confirmed

    def __repr__(self) -> str:
        return f"<Replica of pserver {self.index} [round {self.round} of {self.installed.run}]>"

    @property
    def chain(self) -> str:
        """The chain of the newest logged update, which is applied, too, between two updates."""
        assert self.storage.log.tail is not None
        return self.storage.log.tail.chain

    @property
    def restored(self) -> Restored:
        """The shard and the history with which a pserver continues."""
        return Restored(self.shard, self.schedule.history, self.chain)

    @property
    def max_record_bytes(self) -> int:
        """The size that no record of the leader exceeds."""
        layout = self.shard.layout
        tensors = MAX_TENSORS_OF_RECORD * MASTER_BYTES * layout.num_elements
        return tensors + len(layout.places) * MAX_METADATA_BYTES + (1 << 20)

    def continues(self, installed: InstallRun) -> bool:
        """Return whether the updates of this installation may continue those of the replica; no rollback is between.

        The log of another incarnation must confirm that, with the chain of the newest update.
        """
        own, other = self.installed, installed
        return (own.run, own.attempt, own.durability) == (other.run, other.attempt, other.durability)

    def hold_update(self, record: Record) -> LoggedUpdate:
        """Return the next update, which is held from now on. Raises UnsupportedFormat, and then nothing has changed."""
        update = LoggedUpdate.from_record(record)
        self.held, self.held_chain = update.round, record.chain
        return update

    def discard_held(self) -> None:
        """Hold nothing but the applied updates any more."""
        self.held, self.held_chain = self.round, self.chain

    async def replay(self, update: LoggedUpdate, record: Record) -> None:
        """Log the next update and apply it. An OSError changes nothing; after another error the replica is broken.

        Conflict (`diverged`) is an update for another shard.
        """
        self.schedule.applying = Apply(update.round, update.ranks, ())
        try:
            await self.compute.run(self._replay, update, record)  # never on the loop, since it waits for a disk
        except BaseException:
            self.schedule.applying = None
            raise
        self.schedule.finish_apply(self.stepped_history)
        self.waits.note_round(self.round)
        await asyncio.sleep(0)  # its readers submit their jobs before the next update does

    def _replay(self, update: LoggedUpdate, record: Record) -> None:
        assert self.storage.log.tail is not None
        assert self.storage.log.tail.round == self.shard.version == update.round - 1
        if update.shard is not None and update.shard != self.shard.digest():
            text = f"the replica differs from pserver {self.index} after round {self.shard.version}"
            raise Conflict(text, code="diverged", current=self.shard.version)
        self.storage.log.append_frame(update.round, [record.body], record.chain)
        history = self.schedule.copy_history()
        replay_update(self.shard, history, update, record.data, keep=self.schedule.max_delay + 1)
        self.stepped_history = history


class Lag:
    """The rounds that the leader of a replica has reported, and the replica has not applied."""

    def __init__(self, round_: Round = 0) -> None:
        self.round = round_  # of the replica
        self._reports: deque[tuple[Round, float]] = deque()  # later rounds than the replica's, with their times

    def note_leader(self, round_: Round, now: float) -> None:
        """Note the newest round of the leader."""
        if round_ > max(self.round, self._newest) and len(self._reports) < MAX_REPORTS:
            self._reports.append((round_, now))
        elif round_ > max(self.round, self._newest):
            self._reports[-1] = round_, self._reports[-1][1]

    def note_applied(self, round_: Round) -> None:
        """Note the newest round of the replica."""
        self.round = round_
        while self._reports and self._reports[0][0] <= round_:
            self._reports.popleft()

    @property
    def _newest(self) -> Round:
        return self._reports[-1][0] if self._reports else 0

    @property
    def rounds(self) -> int:
        """The number of rounds that the replica lacks."""
        return max(0, self._newest - self.round)

    def seconds(self, now: float) -> float:
        """Return the time since the leader reported the first round that the replica lacks; 0 if it lacks none."""
        return now - self._reports[0][1] if self._reports else 0.0


class Leader:
    """The pserver at an address. Methods raise the error that it answers, httpx.TransportError and ValueError."""

    def __init__(self, address: str, http: httpx.AsyncClient, updates: httpx.Client) -> None:
        """`updates` is a client for updates alone, with a `PolledTransport`."""
        self._address = address
        self._http = http
        self._updates = updates
        self._num_bytes = 0  # of the newest answer with updates

    async def read_run(self) -> ServedRun:
        """Return the run that the pserver serves."""
        timeout = httpx.Timeout(RUN_SECONDS, connect=CONNECT_SECONDS)
        response = await self._http.get(self._address + routes.RUN, timeout=timeout)
        raise_for_problem(response)
        return ServedRun.from_answer(response.content)

    async def read_copy(self, run: str, attempt: int) -> memoryview:
        """Return a copy of the shard, in memory that the caller owns."""
        timeout = httpx.Timeout(REPLY_SECONDS, connect=CONNECT_SECONDS)
        query: dict[str, Any] = {"run": run, "attempt": attempt}
        async with self._http.stream(
            "GET", self._address + routes.SHARD_COPY, params=query, timeout=timeout
        ) as response:
            if may_be_problem(response):
                await response.aread()
            raise_for_problem(response)
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
            return memoryview(body)

    async def read_updates(
        self, replica: Replica, instance: str, incarnation: Incarnation
    ) -> tuple[list[Record], Round]:
        """Return the updates behind the newest one that a replica holds, and the newest round of the leader.

        The request confirms what the replica holds, for this standby. A thread waits for the answer, and the updates
        own their memory. Raises httpx.ReadTimeout for a leader that hangs, and BadInput for damaged records.
        `incarnation` is that of the leader.
        """
        query: dict[str, Any] = {
            "run": replica.installed.run, "attempt": replica.installed.attempt, "after": replica.held,
            "digest": replica.held_chain, "standby": instance, "wait_seconds": POLL_SECONDS,
        }  # fmt: skip
        body = Body(self._num_bytes + SLACK_BYTES, replica.max_record_bytes + MAX_READ_BYTES)
        request = self._updates.build_request(
            "GET", self._address + routes.UPDATES, params=query, timeout=SILENCE_SECONDS,
            extensions={SINK_EXTENSION: body},
        )  # fmt: skip
        response = await asyncio.to_thread(self._updates.send, request)
        raise_for_problem(response)
        expected, actual = str(incarnation), response.headers.get("gradpost-incarnation")
        if actual != expected:  # it was restarted since its run was read, and may have lost updates
            raise StalePserver("the pserver has another incarnation now", expected=expected, actual=actual)
        self._num_bytes = len(body.content) or self._num_bytes
        return parse_records(body.content, replica.held_chain), int(response.headers["gradpost-round"])


class Body(Sink):
    """The sink of an answer. Its memory has room for about as many bytes as the answer before, and grows if needed."""

    def __init__(self, room_bytes: int, max_bytes: int) -> None:
        self._memory = np.empty(room_bytes, np.uint8).data
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def content(self) -> memoryview:
        """The bytes that have been received."""
        return self._memory[: self._num_bytes]

    @override
    def get_buffer(self) -> memoryview:
        if self._num_bytes == len(self._memory):
            if self._num_bytes > self._max_bytes:
                text = "the records of the pserver are too large"
                raise BadInput(text, code="malformed_frame", expected=f"<= {self._max_bytes} bytes")
            grown = np.empty(2 * self._num_bytes, np.uint8).data
            grown[: self._num_bytes] = self._memory
            self._memory = grown
        return self._memory[self._num_bytes :]

    @override
    def buffer_updated(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    @override
    def feed(self, data: memoryview) -> None:
        while len(data):
            room = self.get_buffer()[: len(data)]
            room[:] = data[: len(room)]
            self.buffer_updated(len(room))
            data = data[len(room) :]


def check_software(served: ServedRun) -> None:
    """Raise Conflict (`replica_mismatch`) if this process might compute other bits than the leader."""
    expected = f"torch {served.torch}, {served.cpu}"
    actual = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    if actual != expected:
        text = "this process cannot follow the pserver, because it might compute other bits; use the same torch and CPU"
        raise Conflict(text, code="replica_mismatch", expected=expected, actual=actual)
