"""One run on one pserver with its endpoints, shard, compute thread and condition, under drawn schedules."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.errors import GradpostError, NotReady, RoundPending

from ...soaking import examples
from .oracle import TorchOracle, average, make_options
from .support import (
    PARAMETERS,
    Bench,
    Upload,
    assert_equals_oracle,
    bench,
    decode,
    encode,
    gradients_of,
    initial_values,
)

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
    """The requests and their answers, which the pserver must honour."""

    def __init__(self, bench: Bench, num_trainers: int) -> None:
        self.trainers = set(range(num_trainers))
        self.barriers: defaultdict[int, set[int]] = defaultdict(set)  # round -> who has sent its batch barrier
        self.read: defaultdict[int, set[int]] = defaultdict(set)  # round -> who was answered with it
        self.versions: dict[int, bytes] = {}
        self.applied: list[int] = []
        apply = bench.run.shard.apply

        def watched(gradient: Tensor, *rest: Any) -> list[str]:
            round_ = len(self.applied) + 1
            assert self.barriers[round_] == self.trainers, "applied before all batch barriers"
            assert self.read[round_ - 1] == self.trainers, "applied before all fetch barriers of the round before"
            self.applied.append(round_)
            return apply(gradient, *rest)

        bench.run.shard.apply = watched

    def answered(self, rank: int, round_: int, reply: bytes) -> None:
        assert self.barriers[round_] == self.trainers or round_ == 0, "answered before all batch barriers"
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
    await insist(script, make_get(0))

    for round_ in range(1, LAST_ROUND + 1):
        for push in make_pushes(bench, rank, round_, script):
            await insist(script, push)
            await script.pause()
        barrier = make_barrier(round_, "batch")
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


async def interleave(num_trainers: int, scripts: list[list[int]]) -> None:
    options = [make_options("SGD", lr=1.0, momentum=0.9)]  # a rate at which one wrong bit of a gradient shows
    async with bench(num_trainers, initial=False, groups=options) as b:
        witness = Witness(b, num_trainers)
        async with asyncio.timeout(30), asyncio.TaskGroup() as trainers:
            for rank in range(num_trainers):
                trainers.create_task(train(b, witness, rank, Script(scripts[rank])))
        assert witness.applied == list(range(1, LAST_ROUND + 1)), "each round once"
        assert await b.settle_used_bytes(0) == 0, "a receive buffer was not returned"

        initial = initial_values()
        oracle = TorchOracle(b.plan.optimizer, PARAMETERS, options, initial)
        for round_ in range(LAST_ROUND + 1):
            if round_:
                oracle.step(average([gradients_of(rank, round_) for rank in range(num_trainers)]), options)
            values, _ = decode(witness.versions[round_])
            assert_equals_oracle(values, oracle)


@settings(max_examples=examples(60), deadline=None)
@given(num_trainers=st.integers(1, 3), scripts=st.lists(SCRIPTS, min_size=3, max_size=3))
async def test_any_interleaving_gives_the_bits_of_torch_in_one_process(num_trainers, scripts):
    await interleave(num_trainers, scripts)
