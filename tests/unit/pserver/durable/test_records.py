"""Log files after any accident, and checkpoints that are restored onto other pservers."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.frames import encode_header
from services.pserver.durable.records import MARK_BYTES, PREVIOUS_KEY, Ending, Record, append_record, read_records
from services.pserver.shard.shard import Shard
from services.pserver.shard.shard_state import ShardState, reslice

from ..oracle import make_numbers
from .support import GROUPS, SPEC, alter, gradients, new_shard, plan_for, step

MARK = b"\x00mark\xff\x01\x02"


def write(path: Path, bodies: list[bytes], mark: bytes = MARK) -> list[int]:
    """Over what is there; returns where each record ends, and first of all 0."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    ends, chain = [0], ""
    for number, body in enumerate(bodies):
        header = encode_header([("gradient", "U8", (len(body),))], {"number": str(number), PREVIOUS_KEY: chain})
        end, chain = append_record(fd, ends[-1], mark, [header, body[:3], body[3:]])
        ends.append(end)
    os.close(fd)
    return ends


def read(path: Path) -> tuple[list[bytes], Ending]:
    with path.open("rb") as file:
        # A record's memory is used again for the next one.
        *records, ending = (
            (r.frame.metadata["number"], bytes(r.data)) if isinstance(r, Record) else r
            for r in read_records(file.fileno(), MARK)
        )
    assert isinstance(ending, Ending)
    assert [number for number, _ in records] == [str(i) for i in range(len(records))]
    return [data for _, data in records], ending


bodies = st.lists(st.binary(max_size=300), min_size=1, max_size=5)


@given(bodies, st.data())
@settings(max_examples=100)
def test_a_file_that_was_cut_anywhere_ends_with_its_last_whole_record(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = write(path, written)
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = max(end for end in ends if end <= cut)
    assert read(path) == (written[: ends.index(whole)], Ending("torn" if cut - whole >= MARK_BYTES else "clean", whole))


@given(bodies, bodies, st.data())
@settings(max_examples=100)
def test_records_of_an_earlier_incarnation_are_ignored(tmp_path_factory, former, written, data):
    folder = tmp_path_factory.mktemp("log")
    ends = write(folder / "whole", written)
    whole = (folder / "whole").read_bytes()
    cut = data.draw(st.integers(0, ends[-1]))
    write(folder / "log", former, b"old mark")
    with (folder / "log").open("r+b") as file:
        file.write(whole[:cut])
    content = (folder / "log").read_bytes()  # where the rest of a record is the same, it is whole
    there = [content[begin:end] == whole[begin:end] for begin, end in itertools.pairwise(ends)]
    number = [*there, False].index(False)
    records, ending = read(folder / "log")
    assert records == written[:number]
    assert ending == Ending("torn" if cut - ends[number] >= MARK_BYTES else "clean", ends[number])


@given(bodies, st.data())
@settings(max_examples=200)
def test_a_flipped_bit_is_a_torn_tail_in_the_last_record_and_damage_before_it(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = write(path, written)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    number = max(i for i, end in enumerate(ends) if end <= at)
    is_last, in_mark = number == len(written) - 1, at < ends[number] + MARK_BYTES
    kind = "damaged" if not is_last else "clean" if in_mark else "torn"
    assert read(path) == (written[:number], Ending(kind, ends[number]))


@given(st.lists(st.binary(max_size=20), min_size=4, max_size=6), st.data())
@settings(max_examples=100)
def test_a_dropped_repeated_or_swapped_record_is_damage(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = write(path, written)
    content = path.read_bytes()
    records = [content[begin:end] for begin, end in itertools.pairwise(ends)]
    altered, whole = alter(records, 1, data)
    path.write_bytes(b"".join(altered))
    assert read(path) == (written[:whole], Ending("damaged", ends[whole]))


def test_a_record_that_does_not_fit_ends_the_file_where_it_began(tmp_path, monkeypatch):
    path = tmp_path / "log"
    write(path, [b"former"] * 3, b"old mark")
    _, end = write(path, [b"first"])
    fd = os.open(path, os.O_WRONLY)
    real = os.pwritev

    def half(fd, chunks, at):
        monkeypatch.setattr(os, "pwritev", full)
        return real(fd, [chunks[0]], at)

    def full(fd, chunks, at):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", half)
    with pytest.raises(OSError, match="No space"):
        append_record(fd, end, MARK, [encode_header([], {"number": "1"})])
    assert path.stat().st_size == end
    monkeypatch.setattr(os, "pwritev", real)
    with path.open("rb") as file:
        chain = next(read_records(file.fileno(), MARK)).chain
    append_record(fd, end, MARK, [encode_header([], {"number": "1", PREVIOUS_KEY: chain})])
    os.close(fd)
    assert read(path)[1].kind == "clean"


def test_a_file_that_cannot_be_read_has_no_ending():
    with open("/proc/self/mem", "rb") as file, pytest.raises(OSError, match="Input/output error"):  # at 0 nothing is
        list(read_records(file.fileno(), MARK))


def step_asynchronously(shard, number):
    """Step by one contribution of one of two trainers; the first step counts for both."""
    counter = number % 2 if number > 1 else None
    shard.apply_blocks(gradients(shard, number), make_numbers(SPEC, GROUPS), counter=counter)
    shard.version = number


def trained(plan, rounds, take_step=step):
    shards = [new_shard(plan, index) for index in range(plan.num_pservers)]
    for round_ in range(1, rounds + 1):
        for shard in shards:
            take_step(shard, round_)
    return shards


def encoded(shard, plan):
    """Through a file and back."""
    data = b"".join(shard.state.encode(plan, {"run": "run1"}))
    state, metadata = ShardState.decode(memoryview(bytearray(data)))
    assert metadata["run"] == "run1"
    return state


@given(
    before=st.integers(1, 4), after=st.integers(1, 4), rounds=st.integers(0, 4),
    placement=st.sampled_from(["balanced", "round_robin", "hash"]), whole=st.booleans(),
    take_step=st.sampled_from([step, step_asynchronously]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_values_slots_counts_and_buffers_are_the_same_on_other_pservers(
    before, after, rounds, placement, whole, take_step
):
    old, new = plan_for(before), plan_for(after, placement=placement, slice_parameters=not whole)
    states = [(index, encoded(shard, old)) for index, shard in enumerate(trained(old, rounds, take_step))]
    shards = []
    for index in range(after):
        shard = Shard(new, index)
        shard.load_state(reslice(iter(states), old, new, index))
        assert (shard.is_initialised, shard.version) == (True, rounds)
        shards.append(shard)
    expected = trained(new, rounds, take_step)
    assert [s.digest() for s in shards] == [s.digest() for s in expected]
    for shard, other in zip(shards, expected, strict=True):  # and they go on alike
        take_step(shard, rounds + 1)
        take_step(other, rounds + 1)
        assert shard.digest() == other.digest()
