"""A run whose trainers pull differences: who gets one, what is published after a restart, and what others see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ps_protocol.frames import parse_frame
from ps_protocol.quantisation import add_delta
from ps_protocol.routes import BARRIER_HEADER, SINCE_KEY, VERDICT_HEADER
from ps_protocol.wire_types import SCALES, WireTypes
from services.pserver.inspection import read_blocks
from services.pserver.tensors import TORCH_DTYPES

from .support import Bench, bench, decode

WIRE = WireTypes(pull="int8")


def add(values: dict[str, Tensor], body: bytes) -> dict[str, Tensor]:
    """What a trainer with these values has after this answer."""
    frame = parse_frame(body)
    data = bytearray(body[frame.data_begin :])
    found = {e.name: torch.frombuffer(data, dtype=TORCH_DTYPES[e.dtype], count=e.shape[0], offset=e.begin)
             for e in frame.tensors}  # fmt: skip
    result = {name: value.clone() for name, value in values.items()}
    for name, tensor in found.items():
        if tensor.dtype == torch.int8:
            add_delta(result[name], tensor, found[name + SCALES])
        elif not name.endswith(SCALES):
            result[name] = tensor
    return result


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


async def play(bench: Bench, first: int, last: int) -> dict[str, Tensor]:
    """These rounds; what a trainer has that is there from the start."""
    values, _ = decode(await bench.get(0, first - 1))
    for round_ in range(first, last + 1):
        for rank in range(2):
            await bench.push(rank, round_)
        for rank in range(2):
            await bench.barrier(rank, round_)
        body = await bench.get(0, round_, have=round_ - 1)
        assert parse_frame(body).metadata[SINCE_KEY] == str(round_ - 1)
        values = add(values, body)
        assert_same(decode(await bench.get(1, round_))[0], values)  # whoever comes late has the same
    return values


async def test_who_has_the_round_before_gets_a_difference_and_all_others_what_is_published() -> None:
    async with bench(wire=WIRE) as pserver:
        values = await play(pserver, 1, 3)
        for have in (None, 1):
            body = await pserver.get(1, 3, have=have)
            assert {entry.dtype for entry in parse_frame(body).tensors} == {"F32"}
            assert_same(decode(body)[0], values)
        assert_same(decode(await pserver.get(0, 3, names=["p3.block0"]))[0], {"p3.block0": values["p3.block0"]})
        exact, _ = decode(b"".join(await read_blocks(pserver.run, ["p3.block0"], None, 0)))
        assert 0 < (exact["p3.block0"] - values["p3.block0"]).abs().max() < 0.1


@pytest.mark.parametrize("settings", [{"durability": "log"}, {"durability": "none"}, {"checkpoint_rounds": 3}], ids=str)
async def test_a_pserver_that_was_killed_publishes_what_it_had(tmp_path: Path, settings: dict[str, object]) -> None:
    settings = {"durability": "log", **settings}
    async with bench(wire=WIRE, state_dir=tmp_path, **settings) as pserver:
        expected = await play(pserver, 1, 4)
        if settings["durability"] == "none":
            await pserver.run.want_checkpoint(4)
        digest = await pserver.digest()
    async with bench(wire=WIRE, state_dir=tmp_path, incarnation=2, **settings) as pserver:
        assert pserver.run.round == 4
        body = await pserver.get(0, 4, have=3)  # not a difference: what had come of the one before, nobody knows
        assert {entry.dtype for entry in parse_frame(body).tensors} == {"F32"}
        assert_same(decode(body)[0], expected)
        assert (await pserver.digest()).partition("-")[0] == digest.partition("-")[0]
        again = await play(pserver, 5, 6)
    async with bench(wire=WIRE) as pserver:
        assert_same(await play(pserver, 1, 6), again)


async def test_a_round_that_is_skipped_sends_nothing() -> None:
    async with bench(wire=WIRE, nonfinite="skip_round") as pserver:
        values = await play(pserver, 1, 1)
        verdict = {BARRIER_HEADER: "batch", VERDICT_HEADER: "nonfinite"}
        for rank in range(2):
            await pserver.push(rank, 2)
            await pserver.call("barrier", pserver.fence(rank, 2), headers=verdict)
        body = await pserver.get(0, 2, have=1)
        assert parse_frame(body).tensors == ()
        assert json.loads(parse_frame(body).metadata["skipped_for"]) == [0, 1]
        assert_same(decode(await pserver.get(1, 2))[0], values)
