"""Those who follow the events: so many at once, however they come and go."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Message

from services.coordinator.app import make_coordinator_app
from services.coordinator.coordinator import Coordinator
from services.coordinator.inspection.event_stream import MAX_STREAMS
from services.coordinator.settings import CoordinatorSettings
from services.runtime.metrics import ServiceMetrics

from .asgi_client import AsgiClient

pytestmark = pytest.mark.asyncio


class Follower(AsgiClient):
    def __init__(self) -> None:
        super().__init__("/v1/events/stream")
        self.status = asyncio.get_running_loop().create_future()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status.set_result(message["status"])


async def test_a_burst_does_not_pass_the_limit_and_who_leaves_makes_room() -> None:
    async with httpx.AsyncClient() as http, asyncio.TaskGroup() as tasks:
        app = make_coordinator_app(Coordinator(CoordinatorSettings(), http), ServiceMetrics("coordinator"))

        def follow() -> tuple[Follower, asyncio.Task[None]]:
            follower = Follower()
            return follower, tasks.create_task(follower.ask(app))

        for _ in range(2):  # all places are free again behind those who have left
            burst = [follow() for _ in range(MAX_STREAMS + 5)]
            statuses = [await follower.status for follower, _ in burst]
            assert (statuses.count(200), statuses.count(503)) == (MAX_STREAMS, 5)
            for follower, answered in burst:
                follower.leaves.set()
                await answered
