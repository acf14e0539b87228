"""The stream of records, read in pieces of any size, cut anywhere, and with flipped bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import BadInput, StaleRun
from ps_protocol.frames import encode_header
from services.pserver.durable.record_stream import End, Idle, Received, RecordParser, encode_end, encode_idle
from services.pserver.durable.records import Record, pack_prefix

from .support import alter

MAX_BYTES = 1000
FIRST = "f" * 32

items = st.lists(st.one_of(st.binary(max_size=200), st.integers(0, 10**6)), min_size=1, max_size=6)


def encode_all(items: list[bytes | int]) -> list[bytes]:
    """Records with this data, whose files differ, and idle records of these rounds."""
    records, chain = [], FIRST
    for item in items:
        if isinstance(item, int):
            records.append(encode_idle(item))
            continue
        frame = [encode_header([("gradient", "U8", (len(item),))], {"previous": chain}), item]
        prefix, chain = pack_prefix(b"mark" + len(item).to_bytes(4, "big"), frame)
        records.append(prefix + b"".join(frame))
    return records


def encode(*items: bytes | int) -> bytes:
    """A stream of these records."""
    return b"".join(encode_all(list(items)))


def decode(received: Received) -> bytes | int:
    assert not isinstance(received, End)
    return received.round if isinstance(received, Idle) else bytes(received.data)


def read(parser: RecordParser, stream: bytes, cuts: list[int]) -> list[bytes | int]:
    """Feed the stream in pieces; the records until its end or until damage."""
    found: list[bytes | int] = []
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        found += map(decode, parser.feed(stream[begin:end]))
    return found


cuts = st.lists(st.integers(0, 5000), max_size=30)


@given(items, cuts)
@settings(max_examples=100)
def test_pieces_of_any_size_make_the_same_records(sent: list[bytes | int], places: list[int]) -> None:
    parser = RecordParser(MAX_BYTES)
    assert read(parser, encode(*sent), places) == sent
    assert not parser.is_in_record
    assert (parser.chain is None) == all(isinstance(item, int) for item in sent)


@given(items, cuts, st.integers(0, 5000))
@settings(max_examples=100)
def test_a_stream_that_is_cut_anywhere_has_its_complete_records(
    sent: list[bytes | int], places: list[int], cut: int
) -> None:
    stream = encode(*sent)
    cut %= len(stream)
    ends = [len(encode(*sent[:number])) for number in range(len(sent) + 1)]
    whole = sum(end <= cut for end in ends) - 1
    parser = RecordParser(MAX_BYTES)
    assert read(parser, stream[:cut], places) == sent[:whole]
    assert parser.is_in_record == (cut not in ends)


@given(items, st.integers(0, 50_000))
@settings(max_examples=200)
def test_a_flipped_bit_is_found_or_leaves_the_stream_torn(sent: list[bytes | int], bit: int) -> None:
    stream = bytearray(encode(*sent))
    bit %= 8 * len(stream)
    stream[bit // 8] ^= 1 << bit % 8
    before = sum(len(encode(*sent[: number + 1])) <= bit // 8 for number in range(len(sent)))
    parser, found, is_found = RecordParser(MAX_BYTES), [], False
    try:
        for place in range(len(stream)):
            found += map(decode, parser.feed(stream[place : place + 1]))
    except BadInput as error:
        is_found = error.code == "malformed_frame"
    assert is_found or parser.is_in_record
    assert found == sent[:before]


def test_an_update_is_valid_until_the_second_one_after_it() -> None:
    """Whatever comes between them: its data may be in use still."""
    sent = [bytes([number]) * 100 for number in range(5)]
    received = RecordParser(MAX_BYTES).feed(encode(*(item for data in sent for item in (data, 7, 8, 9))))
    updates: list[Record] = []
    for record in received:
        if isinstance(record, Record):
            updates.append(record)
        assert [bytes(update.data) for update in updates[-2:]] == sent[: len(updates)][-2:]
    assert len(updates) == 5


def test_no_memory_is_taken_for_a_record_above_the_limit() -> None:
    data = bytes(MAX_BYTES)
    with pytest.raises(BadInput, match="impossible length"):
        read(RecordParser(MAX_BYTES), encode(data), [])


def test_the_end_names_its_reason() -> None:
    reason = StaleRun("the pserver serves another run now", current="run2")
    [end] = RecordParser(MAX_BYTES).feed(encode_end(reason))
    assert isinstance(end, End)
    assert (type(end.reason), end.reason.detail, end.reason.facts) == (StaleRun, reason.detail, {"current": "run2"})


def test_a_record_has_its_place_in_the_stream() -> None:
    first, second = RecordParser(MAX_BYTES).feed(encode(b"a", b"bc"))
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert (first.begin, first.end, second.begin) == (0, len(encode(b"a")), first.end)
    assert replace(first, begin=5).data == b"a"


updates = st.lists(st.binary(max_size=20), min_size=3, max_size=6)


@given(updates, st.data())
@settings(max_examples=100)
def test_a_dropped_repeated_or_swapped_record_is_an_error(sent: list[bytes | int], data: st.DataObject) -> None:
    records = encode_all(sent)
    altered, whole = alter(records, 0, data)
    parser, found = RecordParser(MAX_BYTES, FIRST), []
    for record in altered[:whole]:
        found += map(decode, parser.feed(record))
    assert found == sent[:whole]
    with pytest.raises(BadInput, match="does not continue") as error:
        list(parser.feed(altered[whole]))
    assert error.value.code == "malformed_frame"


def test_the_first_record_must_continue_what_the_reader_has() -> None:
    stream = encode(b"a", 5, b"b")
    parser = RecordParser(MAX_BYTES, FIRST)
    *_, last = parser.feed(stream)
    assert isinstance(last, Record)
    assert parser.chain == last.chain
    with pytest.raises(BadInput, match="does not continue"):
        list(RecordParser(MAX_BYTES, "0" * 32).feed(stream))
