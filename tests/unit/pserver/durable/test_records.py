"""A log file after any accident is either read to its end, cut at a torn tail, or known to be damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.frames import encode_header
from services.pserver.durable.records import Ending, Record, append_record, read_records
from services.runtime.places import map_file


def write(path: Path, bodies: list[bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for number, body in enumerate(bodies):
        header = encode_header([("gradient", "U8", (len(body),))], {"number": str(number)})
        append_record(fd, [header, body[:3], body[3:]])
    os.close(fd)


def read(path: Path) -> tuple[list[bytes], Ending]:
    *records, ending = read_records(map_file(path))
    assert isinstance(ending, Ending)
    assert [r.frame.metadata["number"] for r in records if isinstance(r, Record)] == [
        str(i) for i in range(len(records))
    ]
    return [bytes(r.data) for r in records if isinstance(r, Record)], ending


bodies = st.lists(st.binary(max_size=300), min_size=1, max_size=5)


@given(bodies)
@settings(max_examples=50)
def test_what_was_written_is_read(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("log") / "log"
    write(path, written)
    assert read(path) == (written, Ending("clean", path.stat().st_size))


@given(bodies, st.data())
@settings(max_examples=100)
def test_a_file_that_was_cut_anywhere_ends_with_its_last_whole_record(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    write(path, written)
    ends = [0, *(r.end for r in read_records(map_file(path)) if isinstance(r, Record))]
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = max(end for end in ends if end <= cut)
    assert read(path) == (written[: ends.index(whole)], Ending("clean" if cut == whole else "torn", whole))


@given(bodies, st.data())
@settings(max_examples=200)
def test_a_flipped_bit_is_a_torn_tail_in_the_last_record_and_damage_before_it(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    write(path, written)
    ends = [0, *(r.end for r in read_records(map_file(path)) if isinstance(r, Record))]
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    number = max(i for i, end in enumerate(ends) if end <= at)
    kind = "torn" if number == len(written) - 1 else "damaged"
    assert read(path) == (written[:number], Ending(kind, ends[number]))


def test_a_record_that_does_not_fit_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "log"
    write(path, [b"first"])
    size = path.stat().st_size
    fd = os.open(path, os.O_WRONLY)
    real = os.writev

    def half(fd, chunks):
        monkeypatch.setattr(os, "writev", full)
        return real(fd, [chunks[0]])

    def full(fd, chunks):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(OSError, match="No space"):
        append_record(fd, [encode_header([], {"number": "1"})])
    assert path.stat().st_size == size
    monkeypatch.setattr(os, "writev", real)
    append_record(fd, [encode_header([], {"number": "1"})])
    os.close(fd)
    assert read(path)[1].kind == "clean"
