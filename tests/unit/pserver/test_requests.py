"""A pserver receives parts of pushes and their memory, and sends replies that readers borrow."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from ps_protocol.errors import ContributionConflict, StaleRound
from ps_protocol.frames import DEFAULT_LIMITS, encode_header, parse_frame
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import WireTypes
from services.pserver.run.read_pushes import read_blocks
from services.pserver.run.staging import Push, StagedContribution
from services.pserver.shard import reply as reply_module
from services.pserver.shard.bodies import (
    Body,
    BufferPool,
    InFlight,
    StagedBlock,
    check_blocks,
    view_tensors,
)
from services.pserver.shard.layout import ShardLayout
from services.pserver.shard.reply import Reply
from services.pserver.waits import WaitingPulls

from ...raising import raises_code


def receive(push: str, tensors: dict[str, Tensor], size: int = 1000) -> dict[str, Tensor]:
    """Read a push of these tensors to a shard with one block `w.block0` of so many elements."""
    layout = ShardLayout(make_plan([ParameterSpec("w", (size,))], 1, wire=WireTypes(push=push, topk=0.002)), 0)
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.int32: "I32"}
    header = encode_header([(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()])
    data = header + b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors.values())
    body = Body(BufferPool(), len(data))
    body.buffer[:] = data
    body.frame = parse_frame(body.buffer, DEFAULT_LIMITS)
    blocks = read_blocks(body, layout)
    check_blocks(blocks.values())
    return {name: block.tensor() for name, block in blocks.items()}


def test_each_type_is_read_as_what_it_stands_for() -> None:
    ones = torch.ones(1000)
    assert torch.equal(receive("float32", {"w.block0": ones})["w.block0"], ones)
    assert torch.equal(receive("bfloat16", {"w.block0": ones.bfloat16()})["w.block0"], ones.bfloat16())
    bytes_ = {"w.block0": torch.ones(1000, dtype=torch.int8), "w.block0.scales": torch.full((4,), 2.0)}
    assert torch.equal(receive("int8", bytes_)["w.block0"], 2 * ones)
    some = {"w.block0": torch.tensor([5.0, 6.0]), "w.block0.indices": torch.tensor([7, 999], dtype=torch.int32)}
    assert receive("topk", some)["w.block0"].nonzero().flatten().tolist() == [7, 999]


INTEGERS = torch.ones(1000, dtype=torch.int8)


@pytest.mark.parametrize(
    ("push", "tensors", "error"),
    [
        ("int8", {"w.block0": INTEGERS}, "malformed_frame"),
        ("int8", {"w.block0.scales": torch.ones(4)}, "malformed_frame"),
        ("int8", {"w.block0": INTEGERS, "w.block0.scales": torch.ones(5)}, "wrong_shape"),
        ("int8", {"w.block0": torch.ones(1000), "w.block0.scales": torch.ones(4)}, "wrong_dtype"),
        ("int8", {"w.block0": INTEGERS, "w.block0.indices": torch.ones(4)}, "malformed_frame"),
        ("float32", {"w.block0": torch.ones(1000), "w.block0.scales": torch.ones(4)}, "unknown_block"),
        ("bfloat16", {"w.block0": torch.ones(1000)}, "wrong_dtype"),
        *(
            ("topk", {"w.block0": torch.ones(2), "w.block0.indices": torch.tensor(indices, dtype=torch.int32)}, error)
            for indices, error in (
                ([3, 3], "malformed_frame"),
                ([4, 3], "malformed_frame"),
                ([-1, 3], "malformed_frame"),
                ([3, 1000], "malformed_frame"),
                ([3], "wrong_shape"),
            )
        ),
    ],
)
def test_pushes_that_do_not_fit_are_refused(push: str, tensors: dict[str, Tensor], error: str) -> None:
    with raises_code(error):
        receive(push, tensors)


def receive_block(values: Tensor) -> StagedBlock:
    data = encode_header([("w", "F32", tuple(values.shape))])
    body = Body(BufferPool(), len(data) + values.nbytes)
    body.buffer[:] = data + values.numpy().tobytes()
    body.frame = parse_frame(body.buffer, DEFAULT_LIMITS)
    return StagedBlock(body, view_tensors(body, body.frame.tensors), len(values))


def test_a_push_that_comes_again_is_compared_by_its_bits() -> None:
    def push_again(first: Tensor, second: Tensor) -> int:
        contribution: StagedContribution[StagedBlock] = StagedContribution()
        contribution.stage(0, 1, Push({"w": receive_block(first)}))
        return contribution.stage(0, 1, Push({"w": receive_block(second)})).num_new

    values = torch.tensor([float("nan"), 0.0]).repeat(100_000)
    assert push_again(values, values.clone()) == 0
    for at in (0, 1, 65_535, 65_536, 131_072, 199_999):
        other = torch.zeros(200_000)
        other[at] = -0.0
        with pytest.raises(ContributionConflict):
            push_again(torch.zeros(200_000), other)


def test_each_trainer_has_a_share_and_one_body_always_fits() -> None:
    in_flight = InFlight(200)
    with ExitStack() as bodies:
        for _ in range(2):
            bodies.enter_context(in_flight.reserve(0, 50, 2))
        with raises_code("overloaded", match="trainer 0"), in_flight.reserve(0, 1, 2):
            pass
        bodies.enter_context(in_flight.reserve(1, 10**9, 2))  # the share of the other trainer
        with raises_code("overloaded"), in_flight.reserve(1, 1, 2):
            pass
        assert in_flight.num_bytes == 10**9 + 100
    assert in_flight.num_bytes == 0
    with pytest.raises(ZeroDivisionError), in_flight.reserve(0, 60, 1):
        raise ZeroDivisionError
    assert in_flight.num_bytes == 0


async def test_newer_gets_end_the_oldest() -> None:
    waiting = WaitingPulls(max_each=2)
    order: list[str] = []

    async def get(name: str, rank: int = 0) -> str:
        try:
            with waiting.place(rank):
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            order.append(name)
        return name

    gets = [asyncio.create_task(get(name)) for name in ("a", "b")]
    gets.append(asyncio.create_task(get("of another", rank=1)))
    await asyncio.sleep(0)
    for name in ("c", "d"):
        gets.append(asyncio.create_task(get(name)))
        await asyncio.wait(gets[: len(gets) - 3], timeout=1)
    assert order == ["a", "b"]
    for task in gets:
        task.cancel()
    await asyncio.gather(*gets, return_exceptions=True)
    assert repr(waiting) == "<WaitingPulls [{}]>"


def make_reply() -> Reply:
    return Reply(7, [b"head", memoryview(bytearray(b"values"))])


async def read(reply: Reply, until: asyncio.Event, log: list[str]) -> None:
    with reply.reading():
        log.append("begun")
        try:
            await until.wait()
            log.append("read")
        except asyncio.CancelledError:
            log.append("ended")
            raise


async def test_readers_have_a_grace_period_and_are_then_ended(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(StaleRound, match="round 7 is being overwritten"), reply.reading():
        pytest.fail("it is read")
    assert [type(each) for each in ended] == [type(None), asyncio.CancelledError, asyncio.CancelledError]
