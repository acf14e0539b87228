"""The stream of updates and the copy of a shard: a reader of both has the bits of the pserver, at any speed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import RunStopped, TrainerLost, TryAgain
from ps_protocol.membership import Controls, Membership
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.requests import BARRIER_HEADER, HYPER_PARAMETERS_KEY, VERDICT_HEADER
from ps_protocol.routes import SHARD_COPY, UPDATES
from ps_protocol.wire_types import WireTypes
from services.pserver import replication
from services.pserver.app import make_pserver_app
from services.pserver.durable import log_reader
from services.pserver.durable.record_stream import End, Idle, Received, RecordParser, encode_idle
from services.pserver.durable.records import Record
from services.pserver.durable.replay import replay_update
from services.pserver.durable.update_log import LoggedUpdate, list_segments
from services.pserver.shard.history import History
from services.pserver.shard.shard import Shard
from services.pserver.shard.shard_state import ShardState
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import GIVEN_KEY

from ..runtime.support import http2_client, running
from .oracle import make_options
from .support import Bench, bench, encode, until
from .test_run import scaler_state

Stop = Callable[[Bench], Any]


class Reader:
    """A client of the application, without a network. It takes parts while `takes` is set."""

    def __init__(self, b: Bench, path: str, given: str = "admin", **query: Any) -> None:
        self.status = 0
        self.body = bytearray()  # of another answer than a stream
        self.raw = bytearray()  # of a stream
        self.received: list[Received] = []
        self.takes, self.leaves, self.is_held = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.takes.set()
        self.chain: str | None = None
        self.num_parts = 0
        self._parser = RecordParser(1 << 24, query.get("digest"))
        self._is_stream = path == UPDATES
        self._has_sent = False
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "2", "method": "GET", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": urlencode(query).encode(), "root_path": "",
            "headers": [(b"host", b"x")], "server": ("x", 1), "client": ("x", 2), GIVEN_KEY: given,
        }  # fmt: skip
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver")) if not hasattr(b, "app") else b.app
        b.app = app  # type: ignore[attr-defined]
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self.takes.is_set():
            self.is_held.set()
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.num_parts += 1
        if self._is_stream and self.status == 200:
            self.raw += message.get("body", b"")
            for received in self._parser.feed(message.get("body", b"")):
                if isinstance(received, Record):  # whose memory is reused
                    received = replace(received, body=memoryview(bytearray(received.body)))
                self.received.append(received)
            self.chain = self._parser.chain
        else:
            self.body += message.get("body", b"")

    @property
    def problem(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    @property
    def updates(self) -> list[tuple[LoggedUpdate, memoryview]]:
        return [(LoggedUpdate.from_record(r), r.data) for r in self.received if isinstance(r, Record)]

    @property
    def rounds(self) -> list[int]:
        return [update.round for update, _ in self.updates]

    async def wait_for_round(self, round_: int) -> None:
        await until(lambda: self.rounds[-1:] == [round_])

    async def leave(self) -> None:
        self.leaves.set()
        await asyncio.wait_for(self.task, 5)


@asynccontextmanager
async def logging(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    async with bench(2, state_dir=folder, **{"durability": "log", "checkpoint_rounds": 0, **options}) as b:
        yield b


async def read_copy(b: Bench) -> tuple[Shard, History, str | None]:
    """The shard, its history and its chain from a copy."""
    reader = Reader(b, SHARD_COPY, run="run1", attempt=0)
    await asyncio.wait_for(reader.task, 10)
    assert reader.status == 200
    state, metadata = ShardState.decode(memoryview(reader.body))
    shard = Shard(b.plan, 0)
    shard.load_state(state)
    return shard, History.from_json(metadata["history"]), metadata.get("chain")


async def refusal(b: Bench, **query: object) -> tuple[int, str, dict[str, Any]]:
    reader = Reader(b, UPDATES, **{"run": "run1", "attempt": 0, "after": 0, **query})
    await asyncio.wait_for(reader.task, 10)
    return reader.status, reader.problem["code"], reader.problem


# ---------------------------------------------------------------------- the bits


async def play(b: Bench, first: int, last: int) -> None:
    """Rounds with different contributions, one without a block and one with NaN, clipped where the run clips."""
    for round_ in range(first, last + 1):
        for rank in (0, 1):
            blocks = b.contribution(rank, round_)
            if round_ % 3 == 0:
                del blocks["p1.block0"]
            if round_ == 5:
                blocks["p0.block0"] = blocks["p0.block0"] * math.nan
            metadata = b.completion(num_blocks=len(blocks))
            numbers = [*json.loads(metadata[HYPER_PARAMETERS_KEY]), scaler_state(round_)]
            metadata[HYPER_PARAMETERS_KEY] = json.dumps(numbers)
            await b.call("push", b.fence(rank, round_), encode(blocks, metadata))
        for rank in (0, 1):
            headers = {BARRIER_HEADER: "batch", VERDICT_HEADER: "nonfinite" if round_ == 5 else "finite"}
            await b.call("barrier", b.fence(rank, round_), headers=headers)
        norm = None
        if b.install.max_grad_norm is not None:
            own = await b.norm(0, round_, with_barrier=False)
            norm = AgreedNorm(ShardNorm(own.contributions, own.sum_of_squares), own.sum_of_squares)
        for rank in (0, 1):
            await b.get(rank, round_, norm=norm)


async def play_and_write(b: Bench, first: int, last: int) -> None:
    """Rounds, each followed by the end of its snapshot, so that the next one is due at its round."""
    for round_ in range(first, last + 1):
        await b.run.writer.wait_for_writes()
        await b.play_round(round_)
        await b.run.writer.wait_for_writes()


CONTROLS = Controls(since=2, rates={0: 0.25}, frozen=("p2",))
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "clipped": {"max_grad_norm": 0.5, "optimizer": "AdamW", "groups": [make_options("AdamW", amsgrad=True)]},
    "deltas": {"wire": WireTypes(pull="int8"), "optimizer": "Adam", "groups": [make_options("Adam", lr=0.01)]},
    "controls": {"membership": Membership({0: 1, 1: 1}, controls=(CONTROLS,))},
    "rmsprop": {"optimizer": "RMSprop", "groups": [make_options("RMSprop")]},
    "delayed": {"consistency": Consistency(max_delay=2)},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_a_copy_and_the_records_behind_it_have_the_bits_of_the_shard(tmp_path: Path, kind: str) -> None:
    options = {"nonfinite": "skip_round", **KINDS[kind]}
    async with logging(tmp_path, **options) as b:
        await play(b, 1, 3)
        shard, history, chain = await read_copy(b)
        assert shard.digest() == b.run.shard.digest()
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=shard.version, digest=chain)
        await play(b, 4, 8)
        await reader.wait_for_round(b.run.shard.version)
        for update, data in reader.updates:
            assert update.round == shard.version + 1
            replay_update(shard, history, update, data, keep=b.install.consistency.max_delay + 1)
        assert (shard.version, shard.versions) == (b.run.shard.version, b.run.shard.versions)
        assert shard.digest() == b.run.shard.digest()
        assert history == b.run.schedule.copy_history()
        assert (shard.version, reader.chain) == b.run.storage.newest_update
        await reader.leave()


async def test_a_copy_is_the_file_of_a_snapshot(tmp_path: Path) -> None:
    async with logging(tmp_path) as b:
        await b.play_rounds(1, 3)
        await b.run.want_checkpoint(3)
        await b.wait_until_published()
        [file] = (tmp_path / "pserver-0" / "log").glob(f"{3:012}-*.safetensors")
        reader = Reader(b, SHARD_COPY, run="run1", attempt=0)
        await reader.task
        assert bytes(reader.body) == file.read_bytes()


async def test_a_copy_has_the_chain_of_its_round_although_updates_follow_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with logging(tmp_path) as b:
        await b.play_rounds(1, 3)
        newest, read = b.run.storage.newest_update, b.run.read_between_updates

        async def read_before_an_update(*args: Any) -> Any:
            found = await read(*args)
            await b.play_round(4)
            return found

        monkeypatch.setattr(b.run, "read_between_updates", read_before_an_update)
        shard, _, chain = await read_copy(b)
        assert (shard.version, chain) == newest
        assert b.run.storage.newest_update[0] == 4


# ---------------------------------------------------------------------- the stream


async def test_the_stream_begins_in_the_files_and_goes_on_with_each_update(tmp_path: Path) -> None:
    async with logging(tmp_path) as b:
        await b.play_rounds(1, 4)
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=1)
        await reader.wait_for_round(4)
        for round_ in (5, 6):
            await b.play_round(round_)
            await reader.wait_for_round(round_)
        assert reader.rounds == [2, 3, 4, 5, 6]
        await reader.leave()
        assert not b.run.storage.log._wakers  # an append has no cost without readers


async def test_an_idle_pserver_sends_its_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "IDLE_SECONDS", 0.02)
    async with logging(tmp_path) as b:
        await b.play_rounds(1, 2)
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=2)
        await until(lambda: len(reader.received) >= 3)
        assert reader.received == [Idle(2)] * len(reader.received)
        await reader.leave()


async def test_a_slow_reader_holds_one_part_and_misses_nothing_while_files_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "CHUNK_BYTES", 1000)
    async with logging(tmp_path, checkpoint_rounds=2, keep_checkpoints=1) as b:
        await play_and_write(b, 1, 3)
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=2)
        await reader.wait_for_round(3)
        reader.takes.clear()
        await play_and_write(b, 4, 11)
        assert reader.num_parts <= 10
        segments = list_segments(tmp_path / "pserver-0" / "log")
        assert segments[0].base > 3  # the reader's file is gone, and its bytes are not
        reader.takes.set()
        await asyncio.wait_for(reader.task, 5)
        *records, end = (r for r in reader.received if not isinstance(r, Idle))
        assert [LoggedUpdate.from_record(record).round for record in records] == [3, 4]
        assert isinstance(end, End)
        assert (end.reason.code, end.reason.facts["begin"]) == ("updates_gone", 10)
        again = Reader(b, UPDATES, run="run1", attempt=0, after=10)
        await again.wait_for_round(11)
        await again.leave()


async def test_a_reader_follows_from_file_to_file(tmp_path: Path) -> None:
    async with logging(tmp_path, checkpoint_rounds=2, keep_checkpoints=2) as b:
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=0)
        for round_ in range(1, 16):
            await b.play_round(round_)
            await reader.wait_for_round(round_)
            await b.run.writer.wait_for_writes()
        assert reader.rounds == list(range(1, 16))
        await reader.leave()


# ---------------------------------------------------------------------- refusals and ends


async def test_a_slow_reader_keeps_no_standby_from_a_copy(tmp_path: Path) -> None:
    async with logging(tmp_path) as b:
        slow = Reader(b, SHARD_COPY, "replicate", run="run1", attempt=0)
        slow.takes.clear()
        await slow.is_held.wait()
        standby = Reader(b, SHARD_COPY, run="run1", attempt=0)
        await asyncio.wait_for(standby.task, 5)
        assert (standby.status, slow.task.done()) == (200, False)
        slow.takes.set()
        await slow.task


async def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with logging(tmp_path, checkpoint_rounds=2, keep_checkpoints=1) as b:
        await play_and_write(b, 1, 5)
        status, code, problem = await refusal(b, after=1)
        assert (status, code, problem["begin"]) == (410, "updates_gone", 4)
        status, code, problem = await refusal(b, after=6)
        assert (status, code, problem["current"]) == (409, "future_round", 5)
        assert (await refusal(b, run="other"))[1] == "stale_run"
        assert (await refusal(b, attempt=1))[1] == "stale_run"
        assert (await refusal(b, after="x"))[1] == "invalid_message"
        assert (await refusal(b, after=5, digest="0" * 32))[1] == "diverged"
        monkeypatch.setattr(replication, "MAX_STREAMS", 1)
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=4)
        await reader.wait_for_round(5)
        assert (await refusal(b, after=5))[1] == "overloaded"
        other = Reader(b, UPDATES, "replicate", run="run1", attempt=0, after=4)
        await other.wait_for_round(5)
        await other.leave()
        await reader.leave()
        same = Reader(b, UPDATES, run="run1", attempt=0, after=5, digest=reader.chain)
        await b.play_round(6)
        await same.wait_for_round(6)
        await same.leave()


async def test_the_chain_is_compared_over_the_beginning_of_a_file(tmp_path: Path) -> None:
    async with logging(tmp_path, checkpoint_rounds=2, keep_checkpoints=2) as b:
        first = Reader(b, UPDATES, run="run1", attempt=0, after=0)
        await play_and_write(b, 1, 4)
        await first.wait_for_round(4)
        assert [segment.base for segment in list_segments(tmp_path / "pserver-0" / "log")] == [0, 2, 4]
        assert (await refusal(b, after=2, digest="0" * 32))[1] == "diverged"  # without the record of round 2
        same = Reader(b, UPDATES, run="run1", attempt=0, after=4, digest=first.chain)
        assert (await refusal(b, after=4, digest="0" * 32))[1] == "diverged"
        await b.play_round(5)
        await same.wait_for_round(5)
        await first.leave()
        await same.leave()


async def test_a_run_without_a_log_has_no_stream(tmp_path: Path) -> None:
    async with logging(tmp_path, durability="none") as b:
        await b.play_round(1)
        assert (await refusal(b))[1] == "no_update_log"
        assert (await read_copy(b))[0].digest() == b.run.shard.digest()


ENDS: dict[str, tuple[Stop, str]] = {
    "the pserver stops": (lambda b: b.pserver.stop(), "stopping"),
    "the run fails": (lambda b: b.run.end(TrainerLost("trainer 1 is lost"), is_failure=True), "trainer_lost"),
    "the run is stopped": (lambda b: b.run.end(RunStopped("stopped"), is_failure=True), "run_stopped"),
    "a rollback": (lambda b: b.install_next_run("run1", attempt=1, restore=2, number=2), "stale_run"),
    "another run": (lambda b: b.install_next_run(number=2), "stale_run"),
}


@pytest.mark.parametrize("how", ENDS)
async def test_the_stream_names_the_reason_of_its_end(tmp_path: Path, how: str) -> None:
    stop, code = ENDS[how]
    async with logging(tmp_path) as b:
        await b.play_rounds(1, 3)
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=0)
        await reader.wait_for_round(3)
        await asyncio.wait_for(stop(b), 5)
        await asyncio.wait_for(reader.task, 0.5)
        end = reader.received[-1]
        assert isinstance(end, End)
        assert end.reason.code == code


async def hold_in_round_4(b: Bench) -> Reader:
    """Return a reader that has rounds 1 to 3, and does not take the first part of round 4."""
    await b.play_rounds(1, 3)
    reader = Reader(b, UPDATES, run="run1", attempt=0, after=0)
    await reader.wait_for_round(3)
    reader.takes.clear()
    await b.play_round(4)
    await asyncio.wait_for(reader.is_held.wait(), 10)
    return reader


async def test_a_slow_reader_gets_no_byte_of_the_attempt_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "CHUNK_BYTES", 100)
    async with logging(tmp_path) as b:
        reader = await hold_in_round_4(b)
        before = list_segments(tmp_path / "pserver-0" / "log")[-1].path.read_bytes()
        await b.install_next_run("run1", attempt=1, restore=3, number=2)
        numbers = json.loads(b.completion()[HYPER_PARAMETERS_KEY])
        data = b.run.shard.aggregator.encode(None)
        b.run.storage.append(LoggedUpdate(4, (0, 1), numbers, None), data)  # in the place of the round that was undone
        reader.takes.set()
        await asyncio.wait_for(reader.task, 2)
        assert reader.rounds == [1, 2, 3]
        received = bytes(reader.raw).removeprefix(encode_idle(3))
        assert before.startswith(received)  # neither of another attempt, nor an end within a record
        assert 0 < len(before) - len(received) < len(before) / 4


async def test_a_slow_reader_does_not_hold_the_end_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "DRAIN_SECONDS", 0.05)
    async with logging(tmp_path) as b:
        reader = await hold_in_round_4(b)
        await b.run.end(TryAgain("stopping"))
        await asyncio.wait_for(reader.task, 2)
        assert not any(isinstance(record, End) for record in reader.received)


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
async def test_over_a_socket_a_reader_pauses_and_gets_the_end(tmp_path: Path, version: str) -> None:
    async with logging(tmp_path) as b:
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))
        client = http2_client() if version == "HTTP/2" else httpx.AsyncClient()
        async with running(app) as service, client as http:
            query = {"run": "run1", "attempt": "0", "after": "0"}
            async with http.stream("GET", service.address + UPDATES, params=query) as response:
                assert (response.http_version, response.headers["gradpost-incarnation"]) == (version, "1")
                await b.play_rounds(1, 200)  # some 300 kB, while nothing is read
                await b.pserver.stop()
                parser = RecordParser(1 << 20)
                received = [record async for chunk in response.aiter_raw() for record in parser.feed(chunk)]
        *updates, end = (record for record in received if not isinstance(record, Idle))
        assert [LoggedUpdate.from_record(record).round for record in updates] == list(range(1, 201))
        assert isinstance(end, End)
        assert end.reason.code == "stopping"
