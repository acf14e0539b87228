"""The audit log across lives of the coordinator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.coordinator.audit import FILE, MAX_LISTED, AuditLog


def add(log: AuditLog, action: str = "pause") -> int:
    return log.add(by="me", run="r", action=action, outcome="requested", attempt=0).number


def read(folder: Path) -> AuditLog:
    log = AuditLog(folder)
    log.read()
    return log


def test_numbers_go_on_in_the_next_life_behind_what_is_not_ours(tmp_path: Path) -> None:
    assert [add(read(tmp_path)), add(read(tmp_path))] == [1, 2]
    with (tmp_path / FILE).open("a") as file:
        file.write('someone wrote this\n{"number": 9, "torn')
    log = read(tmp_path)
    assert [entry.number for entry in log.entries()] == [1, 2]
    assert add(log, "resume") == 3
    assert [(entry.number, entry.action) for entry in read(tmp_path).entries()][1:] == [(2, "pause"), (3, "resume")]


def test_a_line_that_is_not_written_whole_is_an_error_and_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real = read(tmp_path), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match="did not take a whole line"):
            add(log)
    assert add(log, "resume") == 1
    for each in (log, read(tmp_path)):
        assert [(entry.number, entry.action) for entry in each.entries()] == [(1, "resume")]


def test_the_newest_are_listed(tmp_path: Path) -> None:
    first = read(tmp_path)
    for _ in range(3):
        add(first)
    line = (tmp_path / FILE).read_text().splitlines()[-1]
    (tmp_path / FILE).write_text("\n".join(line.replace('"number":3', f'"number":{i}') for i in range(1, 2001)) + "\n")
    log = read(tmp_path)
    assert [entry.number for entry in log.entries()] == list(range(2001 - MAX_LISTED, 2001))
    assert add(log) == 2001
    assert len(log.entries()) == MAX_LISTED
