"""Reads for other processes that repeat this pserver's updates: the records of the log, and a copy of the whole shard.

Both are made of the bytes that the pserver writes to its disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Query, Request, Response

from ps_protocol import routes
from ps_protocol.errors import Conflict, GradpostError, StaleRun
from ps_protocol.fields import Identifier, Instance, OrdinalText
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.standbys import ServedRun
from ps_protocol.vocabulary import Round
from services.runtime.app import LargeReplies, LargeReply, Stream, stream_chunks, watch_for_disconnect

from .pserver import Pserver
from .run.run import Run
from .run.sync_run import SyncRun
from .shard.shard_state import ShardState

MAX_WAIT_SECONDS = 10.0
UPDATES_TYPE = "application/x-gradpost-updates"


async def find_updates(
    run: Run, after: Round, chain: str | None, wait_seconds: float, standby: Instance | None, left: asyncio.Task[None]
) -> Response:
    """Return the records of the log behind a round, as they are in its file, or none if there are none in time.

    A standby that asks for the updates after a round holds all updates up to it: that is its confirmation. The wait
    ends when the client has `left`.
    """
    _check_log(run)
    standbys = None if standby is None else run.standbys
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    left.add_done_callback(lambda _: changed.set())
    log, deadline = run.storage.log, loop.time() + wait_seconds
    log.wakers.add(wake)
    confirmation, records = 0, b""
    try:
        while True:
            changed.clear()
            failure = run.failure  # before the read, which then finds the last update
            try:
                if not log.is_newest(after, chain):  # no thread for an idle pserver
                    records = await asyncio.to_thread(log.read_behind, after, chain)
            except GradpostError:
                run.check_failure()  # which may have closed the log
                raise
            except OSError as error:
                raise run.storage_failed("read its log", error) from error
            if standbys is not None and standby is not None and not confirmation:
                confirmation = standbys.confirm(standby, after)
            if not records and failure is not None:
                run.check_failure()
            if records or loop.time() >= deadline or left.done():
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
    finally:
        log.wakers.discard(wake)
        if left.done() and standbys is not None and standby is not None:
            standbys.remove(standby, confirmation)
    newest = after if log.tail is None else log.tail.round
    headers = {"gradpost-incarnation": str(run.installed.incarnation), "gradpost-round": str(newest)}
    return Response(records, headers=headers, media_type=UPDATES_TYPE)


def _check_log(run: Run) -> None:
    """Raise NotReady, or Conflict, unless the updates of a run can be read."""
    run.check_readable()
    if not run.storage.has_log:
        raise _make_refusal(run)


def _make_refusal(run: Run) -> Conflict:
    text = f"pserver {run.index} has no log of updates; set durability to log, fsync or replicated, in mode sync"
    return Conflict(text, code="no_update_log", expected="log, fsync or replicated", actual=run.installed.durability)


@asynccontextmanager
async def copy_shard(run: Run) -> AsyncIterator[Stream]:
    """Open a stream of a copy of the shard as it is between two updates: the file of a checkpoint.

    It may contain updates that wait for standbys: one of these may need the copy.
    """
    run.check_failure()
    run.check_readable()
    if not isinstance(run, SyncRun):
        raise _make_refusal(run)

    def copy(metadata: Any) -> tuple[ShardState, dict[str, str]]:
        return run.shard.state.clone(), run.storage.describe_shard(run.stepped_history)

    state, description = await run.read_between_updates(copy)
    run.check_failure()  # the newest step may have failed
    yield stream_chunks(state.encode(run.plan, description), {"gradpost-round": str(state.version)})


def add_replication_routes(app: FastAPI, pserver: Pserver) -> None:
    """Add the routes that followers read."""
    copies = LargeReplies(max_at_once=1)
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
        run.check_failure()
        _check_log(run)
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
        wait_seconds: Annotated[
            float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds to wait for a record")
        ] = 0,
        standby: Annotated[
            Instance | None,
            Query(description="standby that holds all updates up to `after`"),
        ] = None,
    ) -> Response:
        """Return whole records of the log behind a round, waiting for the first one, or none of them in time."""
        left = watch_for_disconnect(request.receive)
        try:
            return await find_updates(check_run(run, attempt), after, digest, wait_seconds, standby, left)
        finally:
            left.cancel()

    @app.get(
        routes.SHARD_COPY,
        tags=["replication"],
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE: binary}}},
    )
    async def shard_copy(run: Identifier, attempt: OrdinalText) -> Response:
        """Return values, optimizer state and history of this shard, as of one round: the file of a checkpoint."""
        served = check_run(run, attempt)
        return LargeReply(copies, lambda: copy_shard(served), CONTENT_TYPE)
