"""A reply that is lent: who reads it is waited for, and then ended; who comes too late reads nothing."""

from __future__ import annotations

import asyncio

import pytest

from ps_protocol.errors import StaleRound
from services.pserver import reply as reply_module
from services.pserver.reply import Reply


def make_reply() -> Reply:
    return Reply(7, [b"head", memoryview(bytearray(b"values"))])


async def read(reply: Reply, until: asyncio.Event, log: list[str]) -> None:
    async with reply.reading():
        log.append("begun")
        try:
            await until.wait()
            log.append("read")
        except asyncio.CancelledError:
            log.append("ended")
            raise


async def test_nobody_reads_it() -> None:
    reply = make_reply()
    async with asyncio.timeout(0.05):
        await reply.revoke()


async def test_who_has_read_it_is_not_waited_for() -> None:
    reply = make_reply()
    async with reply.reading():
        pass
    async with asyncio.timeout(0.05):
        await reply.revoke()


async def test_who_comes_later_reads_nothing() -> None:
    reply = make_reply()
    await reply.revoke()
    with pytest.raises(StaleRound, match="round 7 is being overwritten"):
        async with reply.reading():
            pytest.fail("it is read")


async def test_those_who_are_about_to_end_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_module, "GRACE_SECONDS", 5.0)
    reply, log = make_reply(), list[str]()
    ends = [asyncio.Event(), asyncio.Event()]
    readers = [asyncio.create_task(read(reply, end, log)) for end in ends]
    await asyncio.sleep(0)
    calling = asyncio.create_task(reply.revoke())
    for end in ends:
        await asyncio.sleep(0.01)
        assert not calling.done()
        end.set()
    await asyncio.wait_for(calling, 1)
    assert log == ["begun", "begun", "read", "read"]
    await asyncio.gather(*readers)


async def test_those_who_go_on_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_module, "GRACE_SECONDS", 0.05)
    reply, log = make_reply(), list[str]()
    ends = [asyncio.Event() for _ in range(3)]
    readers = [asyncio.create_task(read(reply, end, log)) for end in ends]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    asyncio.get_running_loop().call_later(0.01, ends[0].set)
    await asyncio.wait_for(reply.revoke(), 5)
    assert loop.time() - begun >= 0.05
    assert log == ["begun"] * 3 + ["read"] + ["ended"] * 2
    ended = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(each) for each in ended] == [type(None), StaleRound, StaleRound]


async def test_it_is_called_back_only_once_the_last_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is ended may still have to give the memory back."""
    monkeypatch.setattr(reply_module, "GRACE_SECONDS", 0.01)
    reply, lets_go = make_reply(), asyncio.Event()

    async def cling() -> None:
        async with reply.reading():
            try:
                await asyncio.sleep(5)
            finally:
                await lets_go.wait()

    reader = asyncio.create_task(cling())
    await asyncio.sleep(0)
    calling = asyncio.create_task(reply.revoke())
    await asyncio.sleep(0.05)
    assert not calling.done()
    lets_go.set()
    await asyncio.wait_for(calling, 5)
    with pytest.raises(StaleRound):
        await reader


async def test_a_reader_that_is_cancelled_is_none() -> None:
    reply, log = make_reply(), list[str]()
    reader = asyncio.create_task(read(reply, asyncio.Event(), log))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    async with asyncio.timeout(0.05):
        await reply.revoke()
    assert log == ["begun", "ended"]


async def test_a_time_out_of_the_reader_is_its_own() -> None:
    reply = make_reply()

    async def read_with_a_limit() -> None:
        async with reply.reading(), asyncio.timeout(0.01):
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        await read_with_a_limit()
