"""A coordinator with pservers that are made up: their answers can be refused, delayed or lost."""

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
from ps_protocol.messages import Freeze, FrozenRounds, InstallMembers, InstallRun
from ps_protocol.routes import FREEZE, MEMBERS, RESTORABLE, RUN
from services.coordinator.coordinator import Coordinator
from services.coordinator.settings import CoordinatorSettings

from .support import join_all, registration

Answer = Callable[[InstallRun | InstallMembers], Any]


class FakePservers:
    """Their side of the control API; `answer` may refuse, hang, or lose the response of one of them."""

    def __init__(self) -> None:
        self.frozen: list[Freeze] = []
        self.taken: dict[str, list[InstallRun | InstallMembers]] = {"0": [], "1": []}
        self.answer: dict[str, Answer] = {}
        self.empty: set[str] = set()  # have lost what they held
        self.ranges = [[0, 4]]  # that everybody can restore
        self.pages: list[httpx.Response] = []  # of a proxy, before what they can restore
        self.short: set[str] = set()  # have lost the end of their logs
        self.on_freeze: Callable[[], None] = lambda: None  # called once

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        index = request.url.host
        if request.url.path == FREEZE:
            self.frozen.append(Freeze.model_validate_json(request.content))
            on_freeze, self.on_freeze = self.on_freeze, lambda: None
            on_freeze()
            if index in self.empty:
                raise NotReady("it holds nothing of the run")
            rounds = FrozenRounds(applied=4, is_short=index in self.short)
            return httpx.Response(200, content=rounds.model_dump_json())
        if request.url.path == RESTORABLE and self.pages:
            return self.pages.pop()
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


def answering(pservers: FakePservers) -> Callable[[httpx.Request], Coroutine[Any, Any, httpx.Response]]:
    """What they raise as the answer that it is."""

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
    shutil.rmtree(folder)


def begin(coordinator: Coordinator) -> list[tuple[int, str, int]]:
    now = coordinator.now()
    for index in (0, 1):
        coordinator.cluster.register_pserver(registration(str(index), index=index), now)
    joined = join_all(coordinator.cluster, now)
    coordinator.changed()
    return [(j.rank, j.run, j.incarnation) for j in joined]


async def eventually(condition: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what it looks at tells nobody
            await asyncio.sleep(0.005)
