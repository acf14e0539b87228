"""The lines of a script that a trainer keeps for the coordinator."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import pytest

from ps_protocol.process_reports import MAX_LINE, MAX_LINES, OutputLines
from trainer_client.client.output import OutputBuffer, keep_streams


def test_lines_are_sent_until_an_answer_and_the_newest_ones_stay() -> None:
    buffer = OutputBuffer()
    buffer.add("stdout", "a\nb\npart")
    sent = buffer.describe()
    assert sent == OutputLines(first=0, lines=("a", "b"), unfinished=("part",))
    buffer.add("stdout", "ly\n")
    assert buffer.describe().lines == ("a", "b", "partly")
    buffer.note_answered(sent)
    assert buffer.describe() == OutputLines(first=2, lines=("partly",))
    buffer.add("stderr", "\n".join(map(str, range(500))))
    newest = buffer.describe()
    assert (newest.first, newest.lines[0], newest.lines[-1], newest.unfinished) == (402, "399", "498", ("499",))
    assert len(newest.lines) == MAX_LINES


def test_a_line_that_is_redrawn_counts_once() -> None:
    buffer = OutputBuffer()
    for percent in range(0, 101, 10):
        buffer.add("stderr", f"\r{percent} %")
    assert buffer.describe() == OutputLines(unfinished=("100 %",))
    buffer.add("stdout", "10 s\r")
    buffer.add("stdout", "20 s\r")
    buffer.add("stdout", "\n")
    buffer.add("stderr", "\n\r\nend\r\n")
    assert buffer.describe() == OutputLines(lines=("20 s", "100 %", "", "end"))


def test_any_text_makes_a_valid_message() -> None:
    buffer = OutputBuffer()
    buffer.add("stdout", "x" * 10_000)
    buffer.add("stdout", "y\n\udce9\n" + "z" * 10_000)
    assert buffer.describe() == OutputLines(lines=("x" * MAX_LINE, "?"), unfinished=("z" * MAX_LINE,))


def test_a_forked_child_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = OutputBuffer()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    buffer.add("stdout", "of a child\n")
    assert buffer.describe() == OutputLines()


def test_kept_streams_pass_everything_on_and_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", inner)
    buffer = OutputBuffer()
    streams = keep_streams(buffer)
    assert (sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.buffer) == ("latin-1", False, inner.buffer)
    kept = sys.stdout
    print("one", flush=True)
    kept.writelines(["two\n", "three\n"])
    with contextlib.redirect_stdout(io.StringIO()):
        print("elsewhere")
    monkeypatch.setattr(buffer, "add", lambda *_: 1 / 0)
    print("four", flush=True)
    assert inner.buffer.getvalue() == b"one\ntwo\nthree\nfour\n"  # type: ignore[attr-defined]
    assert buffer.describe().lines == ("one", "two", "three")
    with contextlib.redirect_stdout(io.StringIO()) as other:
        streams[1].remove()
        streams[0].remove()
        assert sys.stdout is other
    assert sys.stdout is kept  # as `redirect_stdout` found it; it only passes text on
    monkeypatch.undo()
    buffer.add("stderr", "")
    kept.write("five\n")
    assert buffer.describe().lines == ("one", "two", "three")


def test_streams_that_nothing_replaced_are_put_back() -> None:
    before = sys.stdout, sys.stderr
    streams = keep_streams(OutputBuffer())
    assert (sys.stdout, sys.stderr) == tuple(streams)
    for stream in streams:
        stream.remove()
    assert (sys.stdout, sys.stderr) == before
