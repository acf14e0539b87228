"""Reads for other processes that repeat this pserver's updates: the log as a stream, and a copy of the whole shard.

Both are made of the bytes that the pserver writes to its disk. `durable/record_stream.py` describes the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Query, Request, Response
from starlette.types import Receive, Scope, Send

from ps_protocol import routes
from ps_protocol.errors import Conflict, FutureRound, GradpostError, StalePserver, StaleRun, TryAgain
from ps_protocol.fields import Identifier, Instance, OrdinalText
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.standbys import HeldUpdates, ServedRun, ShardDigests
from ps_protocol.vocabulary import Round
from services.runtime.large_replies import PART_BYTES, LargeReplies, LargeReply, Stream, watch_for_disconnect
from services.runtime.security import may_administer

from .durable.log_reader import LogReader
from .durable.record_stream import IDLE_SECONDS, encode_end, encode_idle
from .durable.storage import RunStorage
from .pserver import Pserver
from .run.run import Run
from .run.sync_run import SyncRun
from .shard.shard_state import ShardState

MAX_STREAMS = 16
DRAIN_SECONDS = 1.0  # for the rest of the log, once the run has ended
UPDATES_TYPE = "application/x-gradpost-updates"


class UpdateStreams:
    """The streams of one pserver, which are limited: each holds at most a part of the log of 1 MiB."""

    def __init__(self) -> None:
        self._num_open = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a stream for the block. Raises TryAgain beyond `MAX_STREAMS`."""
        if self._num_open >= MAX_STREAMS:
            raise TryAgain(f"the limit of {MAX_STREAMS} streams of updates is reached", code="overloaded")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


class UpdateStream(Response):
    """The reply that contains the log from the update after a round on, until the run or the connection ends.

    While it is open, the standby that it is for may confirm updates.
    """

    def __init__(
        self, streams: UpdateStreams, run: Run, after: Round, digest: str | None, standby: Instance | None = None
    ) -> None:
        super().__init__(media_type=UPDATES_TYPE)
        self._streams = streams
        self._run = run
        self._storage = _require_log(run)
        self._after = after
        self._digest = digest
        self._standby = standby

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the log, and then each update as soon as it is in the log."""
        loop, changed, limit = asyncio.get_running_loop(), asyncio.Event(), asyncio.timeout(None)

        def note_change() -> None:
            changed.set()
            if self._run.failure is not None and limit.when() is None and not limit.expired():
                with suppress(RuntimeError):  # before the block is entered, or after its end
                    limit.reschedule(loop.time() + DRAIN_SECONDS)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(note_change)

        with self._streams.place():
            left = watch_for_disconnect(receive)
            left.add_done_callback(lambda _: changed.set())
            reader: LogReader | None = None
            try:
                reader = await asyncio.to_thread(self._storage.read_updates, self._after, self._digest)
                self._storage.log.add_waker(wake)
                self._begin_confirmations(left)
                async with limit:
                    note_change()  # the run may have ended meanwhile
                    await self._send(reader, changed, send, left)
            except TimeoutError:
                pass  # a slow reader: the server cuts the response off
            finally:
                self._storage.log.remove_waker(wake)
                left.cancel()
                if reader is not None:
                    reader.close()

    def _begin_confirmations(self, left: asyncio.Task[None]) -> None:
        """Let the standby confirm updates until it has left, or the stream is over and cancels `left`."""
        if self._standby is not None and (standbys := self._run.standbys) is not None:
            stream = standbys.open_stream(self._standby)
            left.add_done_callback(lambda _: standbys.close_stream(stream))

    async def _send(self, reader: LogReader, changed: asyncio.Event, send: Send, left: asyncio.Task[None]) -> None:
        installed = self._run.installed
        headers = [(b"content-type", UPDATES_TYPE.encode()), (b"gradpost-incarnation", b"%d" % installed.incarnation)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        part = self._encode_idle()  # so that the reader gets the headers at once
        while not left.done():
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            changed.clear()
            failure = self._run.failure  # before the read, which then reaches the last update
            try:
                part = await asyncio.to_thread(reader.read)
            except GradpostError as error:
                part, failure = b"", failure or error
            except OSError as error:
                part, failure = b"", failure or self._run.storage_failed("read its log", error)
            if part:
                continue
            if failure is not None and reader.is_in_record:
                return  # the server cuts the response off
            if failure is not None:
                await send({"type": "http.response.body", "body": encode_end(failure)})
                return
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    await changed.wait()
            except TimeoutError:
                part = self._encode_idle()

    def _encode_idle(self) -> bytes:
        tail = self._storage.log.tail
        return encode_idle(0 if tail is None else tail.round)


def _require_log(run: Run) -> RunStorage:
    """Return the storage of a run whose updates can be read. Raises NotReady, Conflict, or the run's failure."""
    run.check_failure()
    run.check_readable()
    if run.storage is None or not run.storage.has_log:
        text = f"pserver {run.index} has no log of updates; set durability to log, fsync or replicated, in mode sync"
        raise Conflict(text, code="no_update_log", expected="log, fsync or replicated", actual=run.installed.durability)
    return run.storage


@asynccontextmanager
async def copy_shard(run: Run) -> AsyncIterator[Stream]:
    """Open a stream of a copy of the shard as it is between two updates: the file of a checkpoint.

    It may contain updates that wait for standbys: one of these may need the copy.
    """

    storage = run.require_storage() if isinstance(run, SyncRun) else _require_log(run)
    assert isinstance(run, SyncRun)  # an asynchronous run has no log
    stepped = run

    def copy(metadata: Any) -> tuple[ShardState, dict[str, str]]:
        return run.shard.state.clone(), storage.describe_shard(stepped.stepped_history)

    state, description = await run.read_between_updates(copy)
    run.check_failure()  # the newest step may have failed
    parts = state.encode(run.plan, description)

    async def cut() -> AsyncIterator[bytes]:
        for part in parts:
            for at in range(0, len(part), PART_BYTES):
                yield bytes(part[at : at + PART_BYTES])

    yield Stream(sum(map(len, parts)), cut(), {"gradpost-round": str(state.version)})


def add_replication_routes(app: FastAPI, pserver: Pserver) -> None:
    """Add the routes that followers read."""
    # Of standbys that may lead, and of all other readers, which would keep the former from a copy.
    streams = {may_lead: UpdateStreams() for may_lead in (True, False)}
    copies = {may_lead: LargeReplies(max_at_once=1) for may_lead in (True, False)}
    digests = LargeReplies(max_at_once=1)
    binary: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}

    def check_run(run: str, attempt: int) -> Run:
        installed = pserver.run.installed
        if (run, attempt) != (installed.run, installed.attempt):
            raise StaleRun(
                f"the pserver serves attempt {installed.attempt} of run {installed.run}", current=installed.attempt
            )
        return pserver.run

    @app.get(routes.RUN, tags=["replication"])
    async def served_run() -> ServedRun:
        """Return the run that followers repeat, once they can begin."""
        run = pserver.run
        _require_log(run)
        installed = run.installed.model_copy(update={"membership": run.membership})
        cpu = torch.backends.cpu.get_cpu_capability()
        return ServedRun(installed=installed, torch=str(torch.__version__), cpu=cpu)

    @app.get(
        routes.UPDATES,
        tags=["replication"],
        response_class=Response,
        responses={200: {"content": {UPDATES_TYPE: binary}}},
    )
    async def updates(
        request: Request,
        run: Identifier,
        attempt: OrdinalText,
        after: Annotated[OrdinalText, Query(description="round of the newest update that the reader has")],
        digest: Annotated[str | None, Query(pattern="^[0-9a-f]{32}$", description="chain of that update")] = None,
        standby: Annotated[
            Instance | None, Query(description="reader that will confirm updates; ignored without scope `admin`")
        ] = None,
    ) -> Response:
        """Return the records of the log after a round, and then each update as soon as it is logged, without an end."""
        may_lead = may_administer(request.scope)
        return UpdateStream(streams[may_lead], check_run(run, attempt), after, digest, standby if may_lead else None)

    @app.post(routes.HELD_UPDATES, tags=["replication"], status_code=204, response_class=Response)
    async def confirm_updates(message: HeldUpdates) -> None:
        """Confirm, for a standby whose stream of updates is open, that it holds all updates up to a round."""
        served = check_run(message.run, message.attempt)
        if message.incarnation != served.installed.incarnation:
            text = f"the updates are from another incarnation of pserver {served.index}"
            raise StalePserver(text, expected=served.installed.incarnation, actual=message.incarnation)
        served.check_failure()
        if served.standbys is None:
            raise Conflict("updates are confirmed with durability `replicated` only")
        if message.round > (newest := served.standbys.newest_logged):
            raise FutureRound(f"the log ends before round {message.round}", current=newest)
        served.standbys.confirm(message.instance, message.round)

    @app.get(
        routes.SHARD_COPY,
        tags=["replication"],
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE: binary}}},
    )
    async def shard_copy(request: Request, run: Identifier, attempt: OrdinalText) -> Response:
        """Return values, optimizer state and history of this shard, as of one round: the file of a checkpoint."""
        served = check_run(run, attempt)
        return LargeReply(copies[may_administer(request.scope)], lambda: copy_shard(served), CONTENT_TYPE)

    @app.get(routes.SHARD_DIGESTS, tags=["replication"])
    async def shard_digests(run: Identifier, attempt: OrdinalText) -> ShardDigests:
        """Return the digest of each block after the newest round; reading the shard delays the next round."""
        served = check_run(run, attempt)
        served.check_readable()

        def read(metadata: Mapping[str, str]) -> ShardDigests:
            return ShardDigests(round=int(metadata["round"]), digests=served.shard.digest_blocks())

        async with digests.slot():
            return await served.read_between_updates(read)
