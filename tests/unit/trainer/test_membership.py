"""A trainer's membership against a coordinator that is silent, slow, stopping, or hidden behind a gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ps_config.environment import PREFIX
from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, GradpostError, NotReady, StaleRun, TrainerLost, TryAgain, Unreachable
from ps_protocol.messages import Leave, TrainerHeartbeat, TrainerHeartbeatReply, TrainerJoined
from trainer_client import membership as membership_module
from trainer_client.membership import Membership
from trainer_client.settings import read_settings

from ...raising import raises_code

pytestmark = pytest.mark.asyncio

JOINED = TrainerJoined(
    run="run1",
    rank=1,
    world_size=2,
    incarnation=1,
    consistency=Consistency(),
    lease_seconds=0.06,
    round_timeout_seconds=5,
)
WELL = TrainerHeartbeatReply(state="training")


class FakeCoordinator:
    """Answers each route with what stands in its list, the last one again and again; raises what is an exception."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers: dict[str, list[Any]] = {"trainers": [JOINED], "heartbeat": [WELL], "leave": [None], **answers}
        self.heard: list[tuple[str, bytes]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.rsplit("/", 1)[-1]
        self.heard.append((route, request.content))
        answers = self.answers[route]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, GradpostError):
            return httpx.Response(answer.status, json=answer.to_problem())
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, content=b"" if answer is None else answer.model_dump_json())

    def num_heard(self, route: str) -> int:
        return sum(heard == route for heard, _ in self.heard)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "RETRY_SECONDS", 0.005)
    for name in [*os.environ]:
        if name.startswith(PREFIX) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@asynccontextmanager
async def member(coordinator: FakeCoordinator, *, joins: bool = True, **settings: Any) -> AsyncIterator[Membership]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(coordinator)) as http:
        membership = Membership(read_settings(retry_seconds=0.2, **settings), http)
        if joins:
            await membership.join(None)
        yield membership
        await membership.leave("done")
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not condition():  # noqa: ASYNC110 - what it looks at tells nobody
            await asyncio.sleep(0.002)


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


# ---------------------------------------------------------------- joining


async def test_joining_goes_on_until_the_coordinator_is_there_and_has_a_place():
    coordinator = FakeCoordinator(
        trainers=[httpx.ConnectError("refused"), NotReady("run 0 is under way"), TryAgain("the service stops"), JOINED]
    )
    async with member(coordinator) as membership:
        assert membership.joined == JOINED
    requests = {content for route, content in coordinator.heard if route == "trainers"}
    assert len(requests) == 1  # the same instance, so that it gets one place


async def test_a_coordinator_that_never_answers_is_given_up_with_a_hint():
    coordinator = FakeCoordinator(trainers=[httpx.ConnectError("refused")])
    async with member(coordinator, joins=False) as membership:
        begun = asyncio.get_running_loop().time()
        match = r"http://127\.0\.0\.1:7070 did not answer for 0\.2 s .*GRADPOST_COORDINATOR its address\?$"
        with pytest.raises(Unreachable, match=match):
            await membership.join(None)
        assert 0.2 <= asyncio.get_running_loop().time() - begun < 2


async def test_a_coordinator_that_takes_the_connection_and_does_not_answer_may_serve_tls():
    coordinator = FakeCoordinator(trainers=[httpx.ReadTimeout("")])
    async with member(coordinator, joins=False) as membership:
        with pytest.raises(Unreachable, match="if it serves TLS, its address begins with https:"):
            await membership.join(None)


# What gateways answer whose backend is away: load balancers, ingresses with a default backend, login pages.
PAGES = [
    httpx.Response(404, text="\n404 page not found\nTraefik"),
    httpx.Response(500, json=["a", "list"]),
    httpx.Response(404, json={"code": 404, "message": "no such route"}),
    httpx.Response(429, text="slow down"),
    httpx.Response(502, text="<html>bad gateway</html>"),
    httpx.Response(503, json=["no", "problem", "document"]),
    httpx.Response(520),
    httpx.Response(302, headers={"location": "/login"}),
    httpx.Response(200, html="<h1>It works!</h1>"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.status_code))
async def test_a_gateway_without_a_coordinator_behind_it_is_as_good_as_none(page):
    coordinator = FakeCoordinator(trainers=[page])
    async with member(coordinator, joins=False) as membership:
        with pytest.raises(
            Unreachable, match=f"7070/v1/trainers answered {page.status_code} .* is it Gradpost?"
        ) as info:
            await membership.join(None)
    first_line = page.text.strip().partition("\n")[0] or "an empty page"
    assert f"without a problem document: {first_line};" in str(info.value)
    assert coordinator.num_heard("trainers") > 2


async def test_a_place_that_others_hold_is_tried_for_a_while():
    coordinator = FakeCoordinator(trainers=[Conflict("a living trainer has rank 1", code="rank_taken")])
    async with member(coordinator, joins=False) as membership:
        with raises_code("rank_taken"):
            await membership.join(None)
    assert coordinator.num_heard("trainers") > 2


async def test_waiting_for_an_earlier_run_has_no_end():
    coordinator = FakeCoordinator(trainers=[NotReady("run 0 is under way")])
    async with member(coordinator, joins=False) as membership:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(membership.join(None), 0.5)


async def test_what_cannot_be_cured_by_waiting_is_raised_at_once():
    coordinator = FakeCoordinator(trainers=[Conflict("another number of trainers", code="world_mismatch")])
    async with member(coordinator, joins=False) as membership:
        with raises_code("world_mismatch"):
            await membership.join(None)
    assert coordinator.num_heard("trainers") == 1


# ---------------------------------------------------------------- heartbeats


async def test_a_failure_that_a_heartbeat_brings_ends_every_wait():
    failure = TrainerLost("trainer 0 was lost", ranks=[0])
    coordinator = FakeCoordinator(
        heartbeat=[WELL, WELL, TrainerHeartbeatReply(state="failed", failure=failure.to_problem())]
    )
    async with member(coordinator) as membership:
        waits = [asyncio.create_task(membership.guard(wait_for_ever())) for _ in range(3)]
        errors = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 3)
        assert [(type(e), str(e)) for e in errors] == [(TrainerLost, "trainer 0 was lost")] * 3
        assert len(set(map(id, errors))) == 3
        with pytest.raises(TrainerLost):  # and every later one
            await membership.guard(wait_for_ever())


@pytest.mark.parametrize(
    "hiccup",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        TryAgain("the service stops"),
        GradpostError("an unexpected error"),
        *PAGES,
    ],
)
async def test_training_goes_on_without_the_coordinator(hiccup):
    page = httpx.Response(200, content=b"<h1>It works!</h1>")
    coordinator = FakeCoordinator(
        heartbeat=[hiccup, hiccup, TryAgain("the body came too slowly", code="slow_body"), page, WELL]
    )
    async with member(coordinator) as membership:
        await eventually(lambda: coordinator.num_heard("heartbeat") > 5)
        assert membership.failure is not None
        assert not membership.failure.done()
        assert await membership.guard(asyncio.sleep(0, "went on")) == "went on"


async def test_an_outage_is_said_once_whatever_else_is_said(capsys):
    coordinator = FakeCoordinator(heartbeat=[httpx.ConnectError("refused")])
    coordinator.answers["summary"] = [NotReady("run 0 is under way")]
    async with member(coordinator) as membership:
        waiting = asyncio.create_task(membership.summary())
        await eventually(lambda: coordinator.num_heard("heartbeat") > 4 and coordinator.num_heard("summary") > 4)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    said = capsys.readouterr()
    assert (said.out + said.err).count("did not answer a heartbeat") == 1
    assert (said.out + said.err).count("waiting: run 0 is under way") == 1


async def test_a_coordinator_that_serves_another_run_ends_every_wait():
    coordinator = FakeCoordinator(heartbeat=[StaleRun("this message belongs to another run")])
    async with member(coordinator) as membership:
        with pytest.raises(StaleRun):
            await asyncio.wait_for(membership.guard(wait_for_ever()), 3)


async def test_a_heartbeat_carries_progress_and_results():
    coordinator = FakeCoordinator()
    async with member(coordinator) as membership:
        membership.round = 4
        membership.results["loss"] = 0.5
        await eventually(lambda: coordinator.num_heard("heartbeat") > 1)
    beats = [TrainerHeartbeat.model_validate_json(c) for route, c in coordinator.heard if route == "heartbeat"]
    assert (beats[-1].round, beats[-1].results, beats[-1].incarnation) == (4, {"loss": 0.5}, 1)


# ---------------------------------------------------------------- guard


async def test_guard_returns_what_the_work_returns_and_raises_what_it_raises():
    async def fail() -> None:
        raise KeyError("mine")

    async with member(FakeCoordinator()) as membership:
        assert await membership.guard(asyncio.sleep(0, 5)) == 5
        with pytest.raises(KeyError):
            await membership.guard(fail())


async def test_guard_ends_the_work_before_it_raises():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # such as a request that must end before its buffer may be used again
            ended.set()

    failure = TrainerLost("trainer 0 was lost").to_problem()
    coordinator = FakeCoordinator(heartbeat=[TrainerHeartbeatReply(state="failed", failure=failure)])
    async with member(coordinator) as membership:
        with pytest.raises(TrainerLost):
            await membership.guard(work())
        assert ended.is_set()


async def test_cancelling_guard_cancels_the_work():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with member(FakeCoordinator()) as membership:
        waiting = asyncio.create_task(membership.guard(work()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.is_set()


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize(("outcome", "expected"), [("done", "done"), ("failed", "failed"), ("whatever", "failed")])
async def test_leaving_sends_the_last_results_first(outcome, expected):
    coordinator = FakeCoordinator()
    async with member(coordinator) as membership:
        membership.results["accuracy"] = 0.98
        await membership.leave(outcome, "x" * 5000)
        assert [route for route, _ in coordinator.heard[-2:]] == ["heartbeat", "leave"]
        assert TrainerHeartbeat.model_validate_json(coordinator.heard[-2][1]).results == {"accuracy": 0.98}
        message = Leave.model_validate_json(coordinator.heard[-1][1])
        assert (message.outcome, len(message.reason)) == (expected, 2000)
        await membership.leave("done")  # again counts once
        assert coordinator.num_heard("leave") == 1


@pytest.mark.parametrize("answer", [StaleRun("another run"), httpx.Response(500, text="?")])
async def test_leaving_is_best_effort(answer):
    async with member(FakeCoordinator(heartbeat=[answer], leave=[answer])):
        pass


# ---------------------------------------------------------------- farewells


async def test_who_is_done_says_so_until_it_is_heard():
    """Else it is waited for, and its loss may end the run of the others."""
    coordinator = FakeCoordinator(leave=[httpx.ConnectError("refused"), TryAgain("the disk is full"), None])
    async with member(coordinator) as membership:
        await membership.leave("done")
    assert coordinator.num_heard("leave") == 3


async def test_nobody_waits_for_ever_to_say_farewell(capsys):
    coordinator = FakeCoordinator(leave=[httpx.ConnectError("refused")])
    async with asyncio.timeout(3), member(coordinator):
        pass
    assert "counts it as lost" in capsys.readouterr().err  # which has consequences for others
    assert coordinator.num_heard("leave") > 3


async def test_who_has_failed_says_so_once():
    coordinator = FakeCoordinator(leave=[httpx.ConnectError("refused")])
    async with member(coordinator) as membership:
        await membership.leave("failed", "no data")
    assert coordinator.num_heard("leave") == 1
