"""A coordinator with simulated pservers, whose responses can be refused, delayed or lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from ps_protocol.errors import GradpostError, NotReady
from ps_protocol.membership import Freeze, FrozenRounds, InstallMembers, InstallRun
from ps_protocol.routes import FREEZE, MEMBERS, RESTORABLE, RUN
from services.coordinator.coordinator import Coordinator
from services.coordinator.settings import CoordinatorSettings

from .support import alive, join_all, leaving, registration

Answer = Callable[[InstallRun | InstallMembers], Any]


class FakePservers:
    """The control API of two pservers; `answer` may refuse, delay or lose the response of one of them."""

    def __init__(self) -> None:
        self.frozen: list[Freeze] = []
        self.taken: dict[str, list[InstallRun | InstallMembers]] = {"0": [], "1": []}
        self.answer: dict[str, Answer] = {}
        self.empty: set[str] = set()  # pservers that have lost their state
        self.ranges = [[0, 4]]  # rounds that every pserver can restore
        self.pages: list[httpx.Response | httpx.HTTPError] = []  # responses of a proxy, before `ranges`, or none
        self.short: set[str] = set()  # pservers that have lost the end of their logs
        self.on_freeze: Callable[[], None] = lambda: None  # called once

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        index = request.url.host
        if request.url.path == FREEZE:
            self.frozen.append(Freeze.model_validate_json(request.content))
            on_freeze, self.on_freeze = self.on_freeze, lambda: None
            on_freeze()
            if index in self.empty:
                raise NotReady("the pserver has no state of the run")
            rounds = FrozenRounds(applied=4, is_short=index in self.short)
            return httpx.Response(200, content=rounds.model_dump_json())
        if request.url.path == RESTORABLE and self.pages:
            page = self.pages.pop()
            if isinstance(page, httpx.HTTPError):
                raise page
            return page
        if request.url.path == RESTORABLE:
            return httpx.Response(200, json=self.ranges)
        if request.url.path not in (RUN, MEMBERS):
            return httpx.Response(404)
        kind = InstallRun if request.url.path == RUN else InstallMembers
        message: Any = kind.model_validate_json(request.content)
        if index in self.answer:
            await self.answer[index](message)
        self.taken[index].append(message)
        return httpx.Response(204)

    def told(self, index: str) -> list[tuple[str, str, int]]:
        return [(type(m).__name__, m.run, m.number) for m in self.taken[index]]

    def hold(self, *indices: str, kind: type = object) -> asyncio.Event:
        """Delay the installations of this kind on these pservers until the event is set."""
        may_go_on = asyncio.Event()

        async def wait(message: object) -> None:
            if isinstance(message, kind):
                await may_go_on.wait()

        self.answer |= dict.fromkeys(indices, wait)
        return may_go_on


def answering(pservers: FakePservers) -> Callable[[httpx.Request], Coroutine[Any, Any, httpx.Response]]:
    """Return a handler that turns the errors of `pservers` into responses."""

    async def handle(request: httpx.Request) -> httpx.Response:
        try:
            return await pservers(request)
        except GradpostError as error:
            return httpx.Response(error.status, content=json.dumps(error.to_problem()))

    return handle


@asynccontextmanager
async def coordinating(pservers: FakePservers, **settings: Any) -> AsyncIterator[Coordinator]:
    folder = tempfile.mkdtemp()
    stop = asyncio.Event()
    options = {
        "num_pservers": 2, "num_trainers": 2, "lease_seconds": 0.4, "state_dir": Path(folder),
        "on_trainer_loss": "fail", "durability": "none", **settings,
    }  # fmt: skip
    async with (
        httpx.AsyncClient(transport=httpx.MockTransport(answering(pservers))) as http,
        asyncio.TaskGroup() as tasks,
    ):
        coordinator = Coordinator(CoordinatorSettings(**options), http)
        tasks.create_task(coordinator.run(stop))
        try:
            yield coordinator
        finally:
            stop.set()
            coordinator.changed()
    shutil.rmtree(folder, ignore_errors=True)  # a thread whose task was cancelled may still write


def begin(coordinator: Coordinator) -> list[tuple[int, str, int]]:
    now = coordinator.now()
    for index in (0, 1):
        coordinator.cluster.register_pserver(registration(str(index), index=index), now)
    joined = join_all(coordinator.cluster, now)
    coordinator.changed()
    return [(j.rank, j.run, j.incarnation) for j in joined]


@asynccontextmanager
async def training(pservers: FakePservers | None = None, **settings: Any) -> AsyncIterator[Coordinator]:
    """Yield a coordinator whose run trains with logs, waits for lost trainers, and has long leases."""
    settings = {"lease_seconds": 30, "on_trainer_loss": "wait", "durability": "log", **settings}
    async with coordinating(pservers or FakePservers(), **settings) as coordinator:
        [first, *_] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        yield coordinator


def heartbeat(coordinator: Coordinator, rank: int, round_: int, **changes: Any) -> None:
    run = coordinator.cluster.run
    message = alive(run.record.trainers[rank].incarnation, run.record.name, round_).model_copy(update=changes)
    coordinator.cluster.trainer_heartbeat(rank, message, coordinator.now())


def leave(coordinator: Coordinator, rank: int, outcome: str = "done", **changes: Any) -> None:
    run = coordinator.cluster.run
    message = leaving(outcome, run.record.trainers[rank].incarnation, run.record.name, **changes)
    coordinator.cluster.leave_trainer(rank, message, coordinator.now())
    coordinator.changed()


async def eventually(condition: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition has no event to wait for
            await asyncio.sleep(0.005)
