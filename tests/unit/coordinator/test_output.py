"""The output of trainers that the coordinator holds."""

from __future__ import annotations

import pytest

from ps_protocol.errors import NotFound
from ps_protocol.messages import Leave, TrainerHeartbeat
from ps_protocol.process_reports import MAX_KEPT_LINES, OutputLines
from services.coordinator.events import OutputLog
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state.run import Run


def send(log: OutputLog, first: int, *lines: str, run: str = "run1", incarnation: int = 1) -> None:
    output = OutputLines(first=first, lines=lines, unfinished=("50 %",))
    log.add(3, TrainerHeartbeat(run=run, incarnation=incarnation, round=0, output=output))


def make_run(name: str = "run1") -> Run:
    return Run.begin(name, CoordinatorSettings(), {})


def test_a_line_that_arrives_twice_is_held_once() -> None:
    log = OutputLog()
    send(log, 0, "a", "b")
    send(log, 0, "a", "b", "c")  # the answer was lost
    send(log, 7, "h")  # lines between were dropped
    assert log.describe(make_run(), 3).lines == ("a", "b", "c", "h", "50 %")
    send(log, 8, *map(str, range(90)))
    send(log, 98, *map(str, range(90, 180)))
    send(log, 188, *map(str, range(180, 270)))
    lines = log.describe(make_run(), 3).lines
    assert (len(lines), lines[0], lines[-2]) == (MAX_KEPT_LINES + 1, "70", "269")


def test_the_output_of_a_failed_incarnation_stays_until_the_next_run() -> None:
    log = OutputLog()
    send(log, 0, "a")
    end = OutputLines(first=1, lines=("b",))
    log.add(3, Leave(run="run1", incarnation=1, outcome="failed", output=end, traceback="ValueError: no"))
    send(log, 0, "c", incarnation=2)
    held = log.describe(make_run(), 3)
    assert (held.lines, held.traceback) == (("a", "b", "c", "50 %"), "ValueError: no")
    send(log, 0, "d", run="run2")
    held = log.describe(make_run("run2"), 3)
    assert (held.lines, held.traceback) == (("d", "50 %"), None)


def test_a_rank_without_a_trainer_is_not_found() -> None:
    log = OutputLog()
    send(log, 0, "a")
    for run, rank in ((make_run(), 2), (make_run("run2"), 3)):
        with pytest.raises(NotFound, match=f"has no trainer {rank}"):
            log.describe(run, rank)
