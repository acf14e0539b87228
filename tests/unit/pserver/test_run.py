"""One run on one pserver, as it really is (endpoints, shard, compute thread, condition), under drawn schedules.

The directed tests at the end are named after the holes that docs/protocol.md closes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from torch import Tensor

from ps_protocol.errors import (
    ApplyFailed,
    BadHeader,
    BadHyperParameters,
    BodyTooLarge,
    Conflict,
    ContributionConflict,
    ContributionMissing,
    FutureRound,
    GradpostError,
    MalformedFrame,
    NonFiniteGradient,
    NotReady,
    RoundPending,
    RoundTimeout,
    StalePserver,
    StaleRound,
    StaleRun,
    StaleTrainer,
    TrainerLost,
    UnknownBlock,
)
from ps_protocol.messages import PserverRegistered
from ps_protocol.routes import WAIT_HEADER
from services.pserver import endpoints as endpoints_module

from .oracle import TorchOracle, assert_same_bits, average, make_options
from .support import (
    GROUPS,
    PARAMETERS,
    Bench,
    Halfway,
    Upload,
    bench,
    decode,
    encode,
    gradients_of,
    initial_values,
)

pytestmark = pytest.mark.asyncio

# ---------------------------------------------------------------- any interleaving

LAST_ROUND = 3
SCRIPTS = st.lists(st.integers(0, 11), min_size=80, max_size=80)


class Script:
    """Numbers that hypothesis drew for one actor; when they are used up, everything is as plain as possible."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = iter(numbers)

    def choose(self, count: int) -> int:
        return next(self._numbers, 0) % count

    async def pause(self) -> None:
        for _ in range(self.choose(4)):
            await asyncio.sleep(0)

    def shuffled(self, items: list[Any]) -> list[Any]:
        rest, result = list(items), []
        while rest:
            result.append(rest.pop(self.choose(len(rest))))
        return result


class Witness:
    """What was sent and answered, to hold the pserver to it."""

    def __init__(self, bench: Bench, num_trainers: int) -> None:
        self.everybody = set(range(num_trainers))
        self.barriers: defaultdict[int, set[int]] = defaultdict(set)  # round -> who has sent its batch barrier
        self.read: defaultdict[int, set[int]] = defaultdict(set)  # round -> who was answered with it
        self.versions: dict[int, bytes] = {}
        self.applied: list[int] = []
        self.late: list[Callable[[], Coroutine[Any, Any, object]]] = []  # requests to repeat at any later time
        apply = bench.run.shard.apply

        def watched(gradient: Tensor, *rest: Any) -> None:
            round_ = len(self.applied) + 1
            assert self.barriers[round_] == self.everybody, "applied before all batch barriers"
            assert self.read[round_ - 1] == self.everybody, "applied before all fetch barriers of the round before"
            self.applied.append(round_)
            apply(gradient, *rest)

        bench.run.shard.apply = watched

    def answered(self, rank: int, round_: int, reply: bytes) -> None:
        assert self.barriers[round_] == self.everybody or round_ == 0, "answered before all batch barriers"
        assert self.versions.setdefault(round_, reply) == reply, "two answers for one version"
        assert decode(reply)[1]["round"] == str(round_)
        self.read[round_].add(rank)


async def insist(script: Script, request: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Send a request as a bad network would: given up at some point, twice at once, again after it was answered."""
    how = script.choose(6)
    if how in (1, 2):  # given up: the client goes away, or the server stops
        task = asyncio.create_task(request())
        await script.pause()
        await script.pause()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if how in (2, 3):  # two at once
        first, second = await asyncio.gather(request(), request(), return_exceptions=True)
        answers = [a for a in (first, second) if not isinstance(a, GradpostError)]
        if answers:
            return answers[0]
    while True:
        try:
            answer = await request()
        except (RoundPending, NotReady):
            await asyncio.sleep(0.001)
            continue
        if how == 4:
            await script.pause()
            await request()  # the answer was lost
        return answer


async def train(bench: Bench, witness: Witness, rank: int, script: Script) -> None:
    def make_get(round_: int, *, rides: bool = False) -> Callable[[], Coroutine[Any, Any, bytes]]:
        wait_seconds, names = script.choose(2) * 5.0, list(bench.run.shard.layout.place) if script.choose(3) else []

        async def get() -> bytes:
            if rides:
                witness.barriers[round_].add(rank)
            reply = await bench.get(rank, round_, wait_seconds, names=names, with_barrier=rides)
            witness.answered(rank, round_, reply)
            return reply

        return get

    def make_barrier(round_: int, kind: str) -> Callable[[], Coroutine[Any, Any, Any]]:
        async def barrier() -> Any:
            if kind == "batch":
                witness.barriers[round_].add(rank)
            return await bench.barrier(rank, round_, kind)

        return barrier

    if rank == 0:
        blocks = [(f"{name}.block0", value) for name, value in initial_values().items()]
        for name, value in script.shuffled(blocks):
            body = encode({name: value})

            def upload(body: bytes = body) -> Coroutine[Any, Any, bytes]:
                return bench.call(
                    "initial", bench.fence(0, 0), body, upload=Upload(body, num_pieces=3, pause=script.pause)
                )

            await insist(script, upload)
            witness.late.append(upload)
    await insist(script, make_get(0))

    for round_ in range(1, LAST_ROUND + 1):
        for push in make_pushes(bench, rank, round_, script):
            await insist(script, push)
            witness.late.append(push)
            await script.pause()
        barrier = make_barrier(round_, "batch")
        witness.late.append(barrier)
        how = script.choose(3)
        if how == 0:
            await insist(script, barrier)
            reply = await insist(script, make_get(round_, rides=False))
        elif how == 1:
            reply = await insist(script, make_get(round_, rides=True))
        else:  # the get comes first and waits for its own trainer, too
            waiting = asyncio.create_task(insist(script, make_get(round_, rides=False)))
            await script.pause()
            await insist(script, barrier)
            reply = await waiting
        await script.pause()
        assert await bench.get(rank, round_) == reply  # again if asked again, until the next round is applied
        if script.choose(2):
            await insist(script, make_barrier(round_, "fetch"))
            witness.late.append(make_barrier(round_, "fetch"))


def make_pushes(bench: Bench, rank: int, round_: int, script: Script) -> Iterator[Callable[[], Any]]:
    """The contribution in any order of blocks and any packaging; the last bucket says how many blocks there are."""
    blocks = script.shuffled(list(bench.contribution(rank, round_).items()))
    buckets: list[dict[str, Tensor]] = [{}]
    for name, tensor in blocks:
        if script.choose(2):
            buckets.append({})
        buckets[-1][name] = tensor
    for bucket in buckets:

        def push(bucket: dict[str, Tensor] = bucket) -> Any:
            return bench.push(
                rank, round_, bucket, last=bucket is buckets[-1],
                upload=lambda body: Upload(body, num_pieces=3, pause=script.pause),
            )  # fmt: skip

        yield push


async def haunt(bench: Bench, witness: Witness, script: Script, until: asyncio.Event) -> None:
    """Late and forged requests all the time. None of them may change a thing: the oracle would notice."""
    for _ in range(20):
        for _ in range(5):
            await script.pause()
        if until.is_set():
            return
        how = script.choose(5)
        rank = script.choose(len(witness.everybody))
        if how <= 1 and witness.late:
            request = witness.late[script.choose(len(witness.late))]
            answer = await asyncio.gather(request(), return_exceptions=True)
            assert not isinstance(answer[0], Exception) or isinstance(answer[0], Conflict | NotReady), answer
        elif how == 2:
            with pytest.raises((StaleTrainer, NotReady)):
                await bench.push(rank, 1, fence=bench.fence(rank, 1, trainer_incarnation=7))
        elif how == 3:
            with pytest.raises((FutureRound, NotReady)):
                await bench.push(rank, bench.run.rounds.open + 1 + script.choose(2))
        elif how == 4 and len(witness.barriers[bench.run.rounds.open]) > 0:
            # other bytes, after the true ones are staged
            round_ = bench.run.rounds.open
            rank = min(witness.barriers[round_])
            forged = {name: tensor + 1 for name, tensor in bench.contribution(rank, round_).items()}
            try:
                answer = await bench.push(rank, round_, forged)
            except ContributionConflict:
                continue
            assert answer["status"] == "already_applied"


async def interleave(num_trainers: int, scripts: list[list[int]]) -> None:
    options = [make_options("SGD", lr=1.0, momentum=0.9)]  # a rate at which one wrong bit of a gradient shows
    async with bench(num_trainers, initial=False, groups=options) as b:
        witness = Witness(b, num_trainers)
        over = asyncio.Event()
        ghost = asyncio.create_task(haunt(b, witness, Script(scripts[-1]), over))
        try:
            async with asyncio.timeout(30), asyncio.TaskGroup() as trainers:
                for rank in range(num_trainers):
                    trainers.create_task(train(b, witness, rank, Script(scripts[rank])))
        finally:
            over.set()
            await ghost
        assert witness.applied == list(range(1, LAST_ROUND + 1)), "each round once"
        assert await b.settle_used_bytes(0) == 0, "a receive buffer was not returned"

        initial = initial_values()
        oracle = TorchOracle("SGD", PARAMETERS, options, initial)
        for round_ in range(LAST_ROUND + 1):
            if round_:
                oracle.step(average([gradients_of(rank, round_) for rank in range(num_trainers)]), options)
            values, _ = decode(witness.versions[round_])
            for name, expected in oracle.parameters.items():
                assert_same_bits(values[f"{name}.block0"], expected.detach(), f"{name} of version {round_}")


@settings(max_examples=60, deadline=None)
@given(num_trainers=st.integers(1, 3), scripts=st.lists(SCRIPTS, min_size=4, max_size=4))
async def test_any_interleaving_gives_what_one_process_of_torch_gives(
    num_trainers: int, scripts: list[list[int]]
) -> None:
    await interleave(num_trainers, scripts)


# ---------------------------------------------------------------- holes that the protocol closes


@dataclass(frozen=True)
class Refusal:
    """What an error said, without its traceback, which keeps the request's frames and with them its body."""

    text: str
    facts: dict[str, Any]


async def refused(error: type[GradpostError], request: Awaitable[object]) -> Refusal:
    try:
        await request
    except error as caught:
        return Refusal(str(caught), caught.facts)
    pytest.fail(f"expected {error.__name__}")


async def unchanged(b: Bench, error: type[GradpostError], request: Coroutine[Any, Any, object]) -> Refusal:
    """The request is refused and changes nothing, not even what memory is in use."""
    digest, used = await b.digest(), b.pserver.pool.used_bytes
    refusal = await refused(error, request)
    assert await b.digest() == digest
    assert await b.settle_used_bytes(used) == used
    return refusal


async def keep_busy(b: Bench) -> Callable[[], Awaitable[None]]:
    """Occupy the compute thread; returns what frees it again."""
    begun, free = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert free.wait(10)

    job = asyncio.create_task(b.compute.run(wait))
    while not begun.is_set():  # noqa: ASYNC110 - it is set on another thread
        await asyncio.sleep(0.001)

    async def release() -> None:
        free.set()
        await job

    return release


def begin_push(b: Bench, rank: int, round_: int, **arguments: Any) -> tuple[asyncio.Task[Any], Halfway]:
    """A push whose last bytes do not come before `go` is set."""
    halfway = Halfway()
    push = b.push(rank, round_, upload=lambda body: Upload(body, num_pieces=2, pause=halfway), **arguments)
    return asyncio.create_task(push), halfway


async def test_fence_again_after_the_last_byte_round_applied_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.play_round(1)
        digest = await b.digest()
        halfway.go.set()
        assert (await late)["status"] == "already_applied"
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_last_byte_run_replaced_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.install_next_run()
        digest = await b.digest()
        halfway.go.set()
        await refused(StaleRun, late)
        del late
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_last_byte_pserver_registered_anew_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.pserver.registered(PserverRegistered(index=0, incarnation=2, lease_seconds=10))
        halfway.go.set()
        await refused(StalePserver, late)
        del late
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_last_byte_member_removed_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.change_members(2, {0: 1})
        digest = await b.digest()
        halfway.go.set()
        await refused(StaleTrainer, late)
        del late
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_last_byte_member_replaced_by_its_next_life_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.change_members(2, {0: 1, 1: 2})
        digest = await b.digest()
        halfway.go.set()
        await refused(StaleTrainer, late)
        assert await b.digest() == digest


async def test_fence_again_after_the_last_byte_run_failed_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.change_members(2, {}, failure=TrainerLost("trainer 0 was lost").to_problem())
        halfway.go.set()
        await refused(TrainerLost, late)
        del late
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_check_for_nan_member_removed_meanwhile():
    """The check runs on the compute thread; whoever waits for it has not staged anything yet."""
    async with bench() as b:
        await b.push(1, 1, {})
        await b.push(0, 1)
        await b.barrier(0, 1)
        release = await keep_busy(b)
        push = asyncio.create_task(b.push(0, 1))  # a duplicate
        await asyncio.sleep(0.01)
        await b.change_members(2, {1: 1})
        await release()
        with pytest.raises(StaleTrainer):
            await push


async def test_gets_of_a_round_are_answered_with_exactly_that_version_until_the_next_is_applied():
    async with bench() as b:
        first = await b.play_round(1)
        assert [await b.get(rank, 1) for rank in (0, 1, 0, 1)] == [first] * 4
        await b.push(0, 2)
        await b.barrier(0, 2)
        assert await b.get(1, 1) == first  # trainer 1 is late
        await b.push(1, 2)
        await b.barrier(1, 2)
        second = await b.get(0, 2)
        assert decode(second)[1]["round"] == "2"
        error = await unchanged(b, StaleRound, b.get(1, 1))
        assert error.facts["current"] == 2
        await unchanged(b, StaleRound, b.get(1, 0))
        await unchanged(b, FutureRound, b.get(1, 4))


async def test_a_get_of_some_blocks_is_of_that_version_too():
    async with bench() as b:
        values, _ = decode(await b.play_round(1))
        blocks, metadata = decode(await b.get(0, 1, names=["p3.block0", "p1.block0"]))
        assert metadata["round"] == "1"
        assert blocks.keys() == {"p1.block0", "p3.block0"}
        assert all(torch.equal(values[name], block) for name, block in blocks.items())

        # The next round is applied between the decision to answer and the reading of the values.
        await b.push(0, 2)
        await b.push(1, 2)
        await b.barrier(0, 2)
        release = await keep_busy(b)
        await b.barrier(1, 2)
        await asyncio.sleep(0.01)  # its apply is in the queue of the compute thread
        get = asyncio.create_task(b.get(0, 1, names=["p1.block0"]))
        await asyncio.sleep(0.01)
        await release()
        await refused(StaleRound, get)


async def test_a_get_waits_for_all_batch_barriers():
    async with bench() as b:
        await b.push(0, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        await b.push(1, 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not get.done()
        assert b.run.rounds.missing == [1]
        await b.barrier(1, 1)
        assert decode(await get)[1]["round"] == "1"


async def test_hyper_parameters_of_the_lowest_rank_win_with_one_warning():
    others = [make_options("SGD", momentum=0.9, lr=7.0)]
    async with bench(3) as b:
        oracle = TorchOracle("SGD", PARAMETERS, GROUPS, initial_values())
        with structlog.testing.capture_logs() as lines:
            for round_ in (1, 2):
                for rank in (2, 1, 0):
                    await b.push(rank, round_, groups=others if rank else GROUPS)
                for rank in (2, 1, 0):
                    await b.barrier(rank, round_)
                values, _ = decode(await b.get(0, round_))
                oracle.step(average([gradients_of(rank, round_) for rank in range(3)]), GROUPS)
        for name, expected in oracle.parameters.items():
            assert_same_bits(values[f"{name}.block0"], expected.detach(), name)
        [line] = [line for line in lines if line["log_level"] == "warning"]
        assert (line["used"], line["ignored"]) == ("trainer 0", "trainer 1")
        assert b.metric("gradpost_hyper_parameter_disagreements_total") == 4  # two trainers in two rounds


async def test_contribution_missing():
    async with bench() as b:
        await b.play_round(1)
        await unchanged(b, ContributionMissing, b.barrier(0, 2))
        await b.push(0, 2, dict(list(b.contribution(0, 2).items())[:2]), last=False)
        error = await unchanged(b, ContributionMissing, b.barrier(0, 2))
        assert error.facts["actual"] == 2
        await unchanged(b, ContributionMissing, b.get(0, 2, with_barrier=True))
        await b.push(0, 2)
        assert (await b.barrier(0, 2))["missing"] == [1]


async def test_already_applied_whatever_the_bytes_are():
    async with bench() as b:
        await b.play_round(1)
        digest = await b.digest()
        forged = {name: tensor + 1 for name, tensor in b.contribution(0, 1).items()}
        for blocks in (None, forged, {}):
            assert (await b.push(0, 1, blocks))["status"] == "already_applied"
        assert (await b.barrier(0, 1)) == {"round": 2, "missing": [0, 1]}
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0
        await unchanged(b, StaleTrainer, b.push(0, 1, fence=b.fence(0, 1, trainer_incarnation=2)))


async def test_a_second_upload_of_initial_values_changes_nothing():
    async with bench() as b:
        reply = await b.play_round(1)
        digest = await b.digest()
        await b.upload_initial()
        assert await b.digest() == digest
        assert await b.get(0, 1) == reply
        await unchanged(b, StaleTrainer, b.call("initial", b.fence(1, 0), encode({})))
        await unchanged(b, StaleTrainer, b.call("initial", b.fence(0, 1), encode({})))


async def test_other_bytes_under_one_identity_are_a_conflict():
    async with bench() as b:
        await b.push(0, 1)
        forged = b.contribution(0, 1)
        forged["p3.block0"] = forged["p3.block0"] + 1
        await unchanged(b, ContributionConflict, b.push(0, 1, forged))
        answer = await b.push(0, 1, {"p2.block0": b.contribution(0, 1)["p2.block0"]}, last=False)
        assert answer == {"status": "staged", "staged": 0, "duplicates": 1, "complete": True}


@pytest.mark.parametrize("endpoint", ["send", "initial"])
@pytest.mark.parametrize("num_pieces", [1, 4])
async def test_a_client_that_goes_away_in_its_body_changes_nothing_and_returns_the_buffer(endpoint, num_pieces):
    async with bench(initial=endpoint == "send") as b:
        body = encode(b.contribution(0, 1), b.completion())
        upload = Upload(body[: len(body) // 2], num_pieces=num_pieces, ends=False)
        round_ = 1 if endpoint == "send" else 0
        await unchanged(b, MalformedFrame, b.call(endpoint, b.fence(0, round_), body, upload=upload))
        assert await b.settle_used_bytes(0) == 0


async def test_a_client_that_is_cancelled_in_its_body_changes_nothing_and_returns_the_buffer():
    async with bench() as b:
        push, halfway = begin_push(b, 0, 1)
        await halfway.reached.wait()
        digest = await b.digest()
        assert b.pserver.pool.used_bytes > 0
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        del push
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


@pytest.mark.parametrize("endpoint", ["get", "barrier"])
async def test_a_client_that_goes_away_before_its_request_is_complete_has_sent_no_barrier(endpoint):
    async with bench() as b:
        await b.push(0, 1)
        digest = await b.digest()
        headers = {"gradpost-barrier": "batch", WAIT_HEADER: "1"}
        upload = Upload(b"", ends=False)
        with pytest.raises(ClientDisconnect):
            await b.call(endpoint, b.fence(0, 1), headers=headers, upload=upload, num_bytes=20)
        assert await b.digest() == digest
        assert b.run.rounds.missing == [0, 1]


async def test_a_refused_get_has_not_counted_its_barrier():
    async with bench() as b:
        await b.push(0, 1)
        await unchanged(b, UnknownBlock, b.get(0, 1, names=["nobody.block0"], with_barrier=True))
        await unchanged(b, BadHeader, b.get(0, 1, wait_seconds=-1, with_barrier=True))
        await unchanged(b, BadHeader, b.get(0, 1, wait_seconds=float("nan"), with_barrier=True))
        headers = {"gradpost-barrier": "fetch", WAIT_HEADER: "0"}
        await unchanged(b, BadHeader, b.call("get", b.fence(0, 1), headers=headers))


async def test_a_long_poll_ends_with_round_pending_that_names_the_missing_trainer():
    async with bench(3) as b:
        await b.push(0, 1)
        await b.push(2, 1)
        await b.barrier(0, 1)
        await b.barrier(2, 1)
        begin = asyncio.get_running_loop().time()
        refusal = await unchanged(b, RoundPending, b.get(0, 1, wait_seconds=0.05))
        assert refusal == Refusal("round 1 waits for trainer 1", {"missing": [1], "round": 1})
        assert asyncio.get_running_loop().time() - begin >= 0.05
        with pytest.raises(RoundPending):
            await b.get(2, 1, wait_seconds=0)


async def test_round_timeout_names_the_missing_trainer():
    async with bench(round_timeout_seconds=0.1) as b:
        await b.push(0, 1)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(RoundTimeout, match=r"trainer 1 did not reach the batch barrier of round 1") as caught:
            await b.get(0, 1, wait_seconds=20, with_barrier=True)
        assert caught.value.facts == {"missing": [1], "round": 1}
        assert 0.1 <= asyncio.get_running_loop().time() - begin < 2
        # It is not the pserver that ends the run: who comes after all is let in.
        await b.push(1, 1)
        await b.barrier(1, 1)
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_round_timeout_counts_from_the_first_who_waits_whatever_it_sent():
    """Nobody has sent a barrier; who merely asks must not wait for ever either."""
    async with bench(round_timeout_seconds=0.1) as b:
        with pytest.raises(RoundTimeout, match="trainers 0, 1"):
            await b.get(0, 1, wait_seconds=20)


async def test_round_timeout_names_the_trainer_that_owes_the_initial_values():
    async with bench(initial=False, round_timeout_seconds=0.15) as b:
        with pytest.raises(NotReady, match="initial values") as pending:
            await b.get(1, 0, wait_seconds=0.01)
        assert pending.value.facts == {"waiting_for": "trainer 0"}
        await asyncio.sleep(0.1)
        value = initial_values()["p0"]
        await b.call("initial", b.fence(0, 0), encode({"p0.block0": value}))  # it is slow, but it goes on
        with pytest.raises(NotReady):
            await b.get(1, 0, wait_seconds=0.1)
        with pytest.raises(RoundTimeout, match="trainer 0") as caught:
            await b.get(1, 0, wait_seconds=20)
        assert caught.value.facts["missing"] == [0]


async def test_the_round_time_out_begins_anew_with_every_round_and_change_of_members():
    async with bench(3, round_timeout_seconds=0.2) as b:
        await b.push(0, 1)
        await b.barrier(0, 1)
        await asyncio.sleep(0.15)
        await b.change_members(2, {1: 1, 2: 1})  # the one who waited has left, so nobody waits now
        assert b.run.waiting_seconds == 0
        await b.push(1, 1)
        with pytest.raises(RoundPending):
            await b.get(1, 1, wait_seconds=0.1, with_barrier=True)
        await b.push(2, 1)
        await b.barrier(2, 1)
        await b.get(1, 1)
        assert b.run.waiting_seconds == 0


async def test_a_failure_installed_by_the_coordinator_wakes_all_waiters():
    async with bench(3) as b:
        for rank in (0, 1):
            await b.push(rank, 1)
        gets = [asyncio.create_task(b.get(rank, 1, with_barrier=True)) for rank in (0, 1)]
        await asyncio.sleep(0)
        gets.append(asyncio.create_task(b.get(0, 1, names=["p1.block0"])))
        await asyncio.sleep(0.01)
        failure = TrainerLost("trainer 2 was lost", ranks=[2]).to_problem()
        begin = asyncio.get_running_loop().time()
        await b.change_members(2, {0: 1, 1: 1}, failure=failure)
        errors = await asyncio.gather(*gets, return_exceptions=True)
        assert asyncio.get_running_loop().time() - begin < 1
        assert [(type(e), str(e)) for e in errors] == [(TrainerLost, "trainer 2 was lost")] * 3
        assert len(set(map(id, errors))) == 3  # one shared exception would collect everybody's frames
        for request in (b.push(1, 1), b.barrier(1, 1), b.get(1, 0), b.call("initial", b.fence(0, 0), encode({}))):
            await unchanged(b, TrainerLost, request)
        await b.change_members(3, {}, failure=TrainerLost("trainer 0 was lost").to_problem())
        with pytest.raises(TrainerLost, match="trainer 2"):  # the first failure stands
            await b.get(0, 1)


async def test_a_failed_run_keeps_nothing_of_the_requests_that_it_refuses():
    async with bench() as b:
        await b.change_members(2, {}, failure=TrainerLost("trainer 1 was lost").to_problem())
        for _ in range(3):
            with pytest.raises(TrainerLost):
                await b.push(0, 1)
        assert b.run.failure.__traceback__ is None


async def test_an_older_number_of_members_changes_nothing():
    async with bench(3) as b:
        await b.change_members(5, {0: 1, 1: 1})
        await b.change_members(4, {0: 1, 1: 1, 2: 1})
        await b.change_members(5, {}, failure=TrainerLost("late").to_problem())
        assert b.run.rounds.members == {0: 1, 1: 1}
        assert b.run.failure is None


async def test_members_that_leave_are_not_waited_for():
    async with bench() as b:
        await b.push(0, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        await asyncio.sleep(0)
        await b.change_members(2, {0: 1})
        values, _ = decode(await get)
        oracle = TorchOracle("SGD", PARAMETERS, GROUPS, initial_values())
        oracle.step(average([gradients_of(0, 1)]), GROUPS)
        assert_same_bits(values["p3.block0"], oracle.parameters["p3"].detach(), "p3")


async def test_a_waiter_whose_trainer_is_removed_is_told_so():
    async with bench() as b:
        await b.push(1, 1)
        get = asyncio.create_task(b.get(1, 1, with_barrier=True))
        await asyncio.sleep(0.01)
        await b.change_members(2, {0: 1})
        with pytest.raises(StaleTrainer):
            await asyncio.wait_for(get, 1)


async def test_waiters_of_a_replaced_run_are_told_so_at_once():
    async with bench() as b:
        await b.push(0, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        await asyncio.sleep(0.01)
        await b.install_next_run()
        with pytest.raises(StaleRun):
            await asyncio.wait_for(get, 1)
        del get
        assert await b.settle_used_bytes(0) == 0


async def test_a_late_installation_of_a_replaced_run_does_not_bring_it_back():
    async with bench() as b:
        await b.install_next_run()
        with pytest.raises(StaleRun):
            await b.pserver.install_run(b.install)
        assert b.run.install.run == "run2"
        with pytest.raises(StalePserver):
            await b.install_next_run("run3", incarnation=9)
        assert b.run.install.run == "run2"


async def test_the_same_installation_again_changes_nothing_but_brings_newer_members():
    async with bench() as b:
        await b.push(0, 1)
        digest = await b.digest()
        await b.pserver.install_run(b.install)
        assert await b.digest() == digest
        await b.pserver.install_run(b.install.model_copy(update={"number": 9, "members": {0: 1}}))
        assert b.run.rounds.members == {0: 1}
        other = {**b.install.plan, "buffers": [["mean", [2], "F32", 0]]}
        with pytest.raises(Conflict):
            await b.pserver.install_run(b.install.model_copy(update={"plan": other}))
        await b.change_members(9, {0: 1, 1: 1})  # the number came with the installation
        assert b.run.rounds.members == {0: 1}


async def test_an_initial_upload_that_is_cancelled_at_its_end_can_be_repeated():
    """Its values are stored by then; only the retry can make version 0 readable."""
    async with bench(initial=False) as b:
        release = await keep_busy(b)
        upload = asyncio.create_task(b.upload_initial())
        await asyncio.sleep(0.01)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        await release()
        await b.upload_initial()
        assert decode(await b.get(1, 0, wait_seconds=1))[1]["round"] == "0"


async def test_the_request_that_completed_the_barrier_may_go_away():
    async with bench(1) as b:
        await b.push(0, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        release = await keep_busy(b)
        await asyncio.sleep(0.01)
        assert b.run.rounds.applying
        get.cancel()
        await release()
        await asyncio.gather(get, return_exceptions=True)
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_a_cancelled_waiter_leaves_the_condition_to_the_others():
    async with bench() as b:
        await b.push(0, 1)
        gets = [asyncio.create_task(b.get(0, 1, with_barrier=True)) for _ in range(5)]
        await asyncio.sleep(0.01)
        for get in gets[:4]:
            get.cancel()
        await b.push(1, 1)
        await b.barrier(1, 1)
        assert decode(await gets[4])[1]["round"] == "1"
        assert all(get.cancelled() for get in gets[:4])


async def test_an_apply_that_fails_ends_every_wait():
    async with bench() as b:

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        b.run.shard.apply = fail
        await b.push(0, 1)
        await b.push(1, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        await asyncio.sleep(0.01)
        await b.barrier(1, 1)
        with pytest.raises(ApplyFailed, match=r"pserver 0 failed in round 1: out of memory"):
            await asyncio.wait_for(get, 2)
        with pytest.raises(ApplyFailed):
            await b.push(0, 2)


async def test_a_push_before_the_initial_values_is_not_ready():
    async with bench(initial=False) as b:
        await unchanged(b, NotReady, b.push(0, 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_a_non_finite_gradient_is_refused_under_reject_and_staged_under_allow(value):
    async with bench() as b:
        blocks = b.contribution(0, 1)
        blocks["p2.block0"][63] = value
        error = await unchanged(b, NonFiniteGradient, b.push(0, 1, blocks))
        assert "trainer 0" in str(error)
        assert "p2.block0" in str(error)
        assert b.metric("gradpost_nonfinite_pushes_total") == 1
    async with bench(nonfinite="allow") as b:
        assert (await b.push(0, 1, blocks))["complete"]


@pytest.mark.parametrize("text", ["null", "[]", "{", "[[]]", "[{}]", '[{"lr": NaN}]', "[" * 100_000])
async def test_hyper_parameters_that_do_not_fit_are_refused(text):
    async with bench() as b:
        metadata = {**b.completion(), "hyper_parameters": text}
        body = encode(b.contribution(0, 1), metadata)
        await unchanged(b, BadHyperParameters, b.call("send", b.fence(0, 1), body))


@pytest.mark.parametrize("text", ["-1", "1.0", "", "9" * 10, "٣"])
async def test_a_number_of_blocks_that_is_none_is_refused(text):
    async with bench() as b:
        body = encode({}, {**b.completion(), "num_blocks": text})
        await unchanged(b, MalformedFrame, b.call("send", b.fence(0, 1), body))


async def test_a_body_that_no_honest_push_could_fill_is_refused_before_it_is_received():
    async with bench() as b:
        taken: list[int] = []
        take = b.pserver.pool.take
        b.pserver.pool.take = lambda n: taken.append(n) or take(n)  # type: ignore[method-assign]
        await unchanged(b, BodyTooLarge, b.call("send", b.fence(0, 1), b"", num_bytes=200 * 1024 * 1024))
        await unchanged(b, BodyTooLarge, b.call("send", b.fence(0, 1), b"", num_bytes=10**15))
        assert taken == []


async def test_a_get_waits_no_longer_than_the_server_allows():
    async with bench() as b:
        await unchanged(b, BadHeader, b.get(0, 1, wait_seconds=endpoints_module.MAX_WAIT_SECONDS + 1))
