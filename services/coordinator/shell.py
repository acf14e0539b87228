"""The shell that the tasks of the coordinator share: the disk, the clock, waiting, and requests to pservers.

The file of the durable state is written at every decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import httpx

from ps_config.control_client import send_message
from ps_protocol.errors import GradpostError, StorageFailed, TryAgain
from ps_protocol.fields import Message
from ps_protocol.messages import PserverState
from ps_protocol.routes import STATE
from ps_protocol.vocabulary import PserverIndex
from services.runtime.checkpoints import COORDINATOR_FOLDER
from services.runtime.logs import get_logger
from services.runtime.storage import lock_folder, seal, unseal, write_file

from .settings import CoordinatorSettings
from .state.cluster import Cluster
from .state.pservers import PserverMember
from .state.record import ClusterRecord
from .state.run import Run

log = get_logger()

TIMEOUT_SECONDS = 5.0  # for the answer of a pserver

NO_ANSWER = (httpx.HTTPError, GradpostError, ValueError)  # silence, a refusal, and the page of a proxy


FILE = "coordinator.json"


class RecordFile:
    """The file on the disk, and the lock of its folder. All methods block, and raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock_path = folder / COORDINATOR_FOLDER  # by which pservers recognise a shared state folder
        self._lock: int | None = None
        self._written: ClusterRecord | None = None

    def lock(self) -> bool:
        """Return whether this process has locked the file. The lock lasts until `unlock` or its end."""
        self._lock = lock_folder(self._lock_path)
        return self._lock is not None

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self) -> ClusterRecord | None:
        """Return the record that was written last; None if there is none. Raises DamagedFile, OSError."""
        if not self._path.exists():
            return None
        return unseal(self._path.read_bytes(), ClusterRecord, str(self._path))

    def write(self, record: ClusterRecord) -> None:
        """Write the record, unless it equals the one that was written last."""
        if record != self._written:
            self._written = None  # if this fails, it is unknown which of the two is there
            write_file(self._path, [seal(record)])
            self._written = record


class Shell:
    """One cluster on one event loop. Whatever changes `cluster` does so synchronously and then calls `changed`."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, settings: CoordinatorSettings) -> None:
        self.cluster = cluster
        self.http = http
        self.settings = settings
        self.file = RecordFile(settings.state_dir)
        self.listeners: list[Callable[[], None]] = []  # called after each change, before another one can hide it
        self.num_changes = 0
        self._news = asyncio.Event()  # replaced whenever it is set
        self._persist_lock = asyncio.Lock()
        self._failing_since: float | None = None  # since when writing has failed
        self._calls: defaultdict[PserverIndex, set[asyncio.Timeout]] = defaultdict(set)
        self._problems: dict[str, str] = {}

    def now(self) -> float:
        """Return the time of the monotonic clock that leases use."""
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------------ changes

    def changed(self) -> None:
        """Act on a change of the cluster, and wake all tasks that wait for one."""
        self.cluster.start_run_if_complete(self.now())
        self.num_changes += 1
        self.notify()

    def notify(self) -> None:
        """Let all waiting tasks check their conditions. Without `changed` the background tasks do not run again."""
        for listener in self.listeners:
            listener()
        self._news.set()
        self._news = asyncio.Event()

    async def wait_until(self, is_so: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds, for at most `seconds`. The condition is checked after every change."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so():
                    await self._news.wait()

    async def wait_for_change(self, seen: int) -> int:
        """Wait until `num_changes` differs from `seen`, and return it."""
        await self.wait_until(lambda: self.num_changes != seen)
        return self.num_changes

    # ------------------------------------------------------------------ the disk

    async def persist(self, transition: Callable[[Run], Run] = lambda run: run) -> None:
        """Persist the cluster's state with a transition of the run, which takes effect once it is on the disk.

        Raises TryAgain if the disk fails, and StorageFailed once it has failed for the round time-out.
        """
        async with self._persist_lock:
            run = self.cluster.run
            record = self.cluster.describe(transition)  # under the lock, so that a newer record is not overwritten
            try:
                await asyncio.to_thread(self.file.write, record)
            except OSError as error:
                text = f"the coordinator's state cannot be written: {error}"
                if self._failing_since is None:
                    self._failing_since = self.now()
                    log.error(text)
                if self.now() - self._failing_since > self.settings.round_timeout_seconds:
                    raise StorageFailed(text) from error
                raise TryAgain(text) from error
            self._failing_since = None
            self.cluster.persisted = record.replicas
            self.cluster.update(run, transition)

    # ------------------------------------------------------------------ pservers

    async def call(
        self,
        member: PserverMember,
        method: str,
        route: str,
        message: Message | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> bytes:
        """Return the body of a pserver's answer. Raises the GradpostError that it contains, or httpx.TransportError.

        Raises httpx.ReadTimeout if another process has replaced the pserver, or `interrupt` ends the wait for it.
        """
        index = member.info.index
        if self.cluster.registry.incarnations.get(index) != member.info.incarnation:
            raise httpx.ReadTimeout(f"another process has replaced pserver {index}")
        limit, calls = asyncio.timeout(None), self._calls[index]
        calls.add(limit)
        try:
            async with limit:
                return await send_message(self.http, method, member.info.address + route, message, timeout=timeout)
        except TimeoutError:
            raise httpx.ReadTimeout("a standby replaces the pserver") from None
        finally:
            calls.discard(limit)

    def interrupt(self, index: PserverIndex) -> None:
        """End the requests to a pserver, which another process replaces."""
        for limit in self._calls[index]:
            if not limit.expired():
                limit.reschedule(self.now())

    async def read_states(self) -> list[PserverState]:
        """Return the states of the living pservers that answer, and note their rounds: heartbeats may be older."""
        members, states = list(self.cluster.registry.members.values()), list[PserverState]()
        for member, answer in zip(members, await asyncio.gather(*map(self._read_state, members)), strict=True):
            failure = answer if isinstance(answer, Exception) else None
            self.note_problem(f"waiting for pserver {member.info.index}", failure)
            if isinstance(answer, PserverState):
                states.append(answer)
                if (answer.run, answer.attempt) == self.cluster.run.record.attempt_id:
                    self.cluster.registry = self.cluster.registry.note_progress(member.info, answer.round)
        return states

    async def _read_state(self, member: PserverMember) -> PserverState | Exception:
        try:
            return PserverState.from_answer(await self.call(member, "GET", STATE))
        except NO_ANSWER as error:
            return error

    def note_problem(self, text: str, error: BaseException | None, **facts: object) -> str:
        """Log why something has failed, once until the reason changes or None removes it. Returns both in words."""
        key, reason = f"{text} {facts}", "" if error is None else str(error) or type(error).__name__
        if reason and self._problems.get(key) != reason:
            log.warning(text, reason=reason, **facts)
        self._problems[key] = reason
        return f"{text}: {reason}"
