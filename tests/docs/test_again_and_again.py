"""What docs/protocol.md says of the fence's order and of requests that come again, tried out on a pserver."""

from __future__ import annotations

import json

import httpx
import pytest

from ps_protocol.errors import ERRORS
from ps_protocol.routes import BARRIER, INITIAL, JOIN_TRAINER, LEAVE

from .apps import call, run_coordinator
from .example import GET, PUSHED, REPLIED, SEND, Request, run_example
from .markdown import codes, read, section, table, tables

TEXT = read("protocol.md")
OTHER = PUSHED[:-2] + b"\0\0"  # another gradient of s
SET_BARRIER = Request("POST", BARRIER, {**SEND.headers, "gradpost-barrier": "batch"})
UPLOAD = Request("POST", INITIAL, {**SEND.headers, "gradpost-round": "0"})


def code(response: httpx.Response) -> str:
    return str(response.json()["code"])


@pytest.mark.asyncio
async def test_the_order_in_which_a_fence_is_checked() -> None:
    rows = table(section(TEXT, "The fence"), "check")
    documented = [name for row in rows for name in codes(row["error"]) if name in ERRORS]
    wrong = {
        "gradpost_run": "other",
        "gradpost_plan": "other",
        "gradpost_pserver_incarnation": "2",
        "gradpost_trainer_incarnation": "2",
        "gradpost_round": "9",
    }
    seen = []
    async with run_example() as http:
        while wrong:
            seen.append(code(await SEND.send(http, PUSHED, **wrong)))
            wrong.pop(next(iter(wrong)))
        await SEND.send(http, PUSHED)
        await GET.send(http)
        seen.append(code(await GET.send(http, gradpost_round="0", gradpost_barrier="batch")))
    assert seen == documented


@pytest.mark.asyncio
async def test_data_requests_that_come_again() -> None:
    documented = {row["request"]: row["the same again"] for row in tables(section(TEXT, AGAIN))[0]}
    async with run_example() as http:
        # initial, complete
        assert (await UPLOAD.send(http, PUSHED)).json()["status"] == "already_applied"
        assert "`already_applied`" in documented["`initial`"]
        # send, round open
        await SEND.send(http, PUSHED)
        again = (await SEND.send(http, PUSHED)).json()
        assert (again["status"], again["staged"], again["duplicates"]) == ("staged", 0, 2)
        assert code(await SEND.send(http, OTHER)) == "contribution_conflict"
        assert codes(documented["`send`, round open"]) == ["duplicates", "contribution_conflict"]
        # barrier, get
        assert [(await SET_BARRIER.send(http)).status_code for _ in range(2)] == [200, 200]
        assert [(await GET.send(http)).content for _ in range(3)] == [REPLIED] * 3
        assert (await SET_BARRIER.send(http)).json() == {"round": 2, "missing": [0], "notice": ""}
        # send, round applied
        assert (await SEND.send(http, OTHER)).json()["status"] == "already_applied"
        assert "`already_applied`" in documented["`send`, round applied"]
        assert (await GET.send(http)).content == REPLIED
        # the next round
        await SEND.send(http, PUSHED, gradpost_round="2")
        assert (await GET.send(http, gradpost_round="2")).status_code == 200
        assert code(await GET.send(http)) == "stale_round"
        assert codes(documented["`get`"]) == ["stale_round"]


AGAIN = "Again and again: what may be retried"


@pytest.mark.asyncio
async def test_what_a_trainer_must_not_do() -> None:
    async with run_example() as http:
        assert code(await SET_BARRIER.send(http)) == "contribution_missing"
        assert code(await SEND.send(http, PUSHED, gradpost_round="2")) == "future_round"
        assert code(await GET.send(http, gradpost_wait_seconds="31")) == "bad_header"
        assert code(await GET.send(http, gradpost_barrier="fetch")) == "bad_header"
        # Refused requests have changed nothing.
        await SEND.send(http, PUSHED)
        assert (await GET.send(http)).content == REPLIED


@pytest.mark.asyncio
async def test_messages_that_come_again() -> None:
    request = {"protocol": 1, "instance": "0123456789", "rank": 0}
    async with run_coordinator() as app, call(app) as http:
        joined = [(await http.post(JOIN_TRAINER, json=request)).json() for _ in range(2)]
        assert joined[0] == joined[1]
        me = {"run": joined[0]["run"], "incarnation": joined[0]["incarnation"]}
        left = [await http.post(LEAVE.format(rank=0), json={**me, "outcome": "done"}) for _ in range(2)]
        assert left[0].status_code == 204
        assert (left[1].status_code, code(left[1])) == (409, "stale_trainer")
        unknown = await http.post(JOIN_TRAINER, content=json.dumps({**request, "colour": "red"}))
        assert code(unknown) == "invalid_message"
