"""A small file says what was written into it, or that it is damaged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.fields import Message
from services.runtime.storage import DamagedFile, seal, unseal


class Numbers(Message):
    attempt: int
    names: tuple[str, ...]


class Others(Message):
    attempt: int


NUMBERS = Numbers(attempt=7, names=("w", "größe", "a}\n"))


def test_what_was_written_is_read():
    assert unseal(memoryview(seal(NUMBERS)), Numbers, "numbers.json") == NUMBERS
    assert json.loads(seal(NUMBERS))["content"] == NUMBERS.model_dump(mode="json")  # for people and their tools


@given(at=st.integers(0, len(seal(NUMBERS)) - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_is_read(at, bit):
    data = bytearray(seal(NUMBERS))
    data[at] ^= 1 << bit
    with pytest.raises(DamagedFile, match=r"numbers\.json is damaged"):
        unseal(memoryview(data), Numbers, "numbers.json")


@given(st.integers(0, len(seal(NUMBERS)) - 1))
def test_nothing_shorter_is_read(size):
    with pytest.raises(DamagedFile):
        unseal(memoryview(seal(NUMBERS)[:size]), Numbers, "numbers.json")


def test_what_another_version_has_written_is_refused_as_such():
    with pytest.raises(DamagedFile, match="written by another version"):
        unseal(memoryview(seal(NUMBERS)), Others, "numbers.json")
