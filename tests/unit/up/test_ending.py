from __future__ import annotations

import signal

import pytest

from gradpost.up.ending import STOP_GRACE_SECONDS, blame, describe_end, end_by_script, end_by_signal, exit_code_of


def test_a_signal_is_passed_on_at_once() -> None:
    ending = end_by_signal(signal.SIGINT, now=10)
    assert (ending.exit_code, ending.reason, ending.stop_signal) == (130, "interrupted", signal.SIGINT)
    assert (ending.signal_at, ending.kill_at) == (10, 10 + STOP_GRACE_SECONDS)
    hang_up = end_by_signal(signal.SIGHUP, now=10)
    assert (hang_up.exit_code, hang_up.reason, hang_up.stop_signal) == (129, "ended by SIGHUP", signal.SIGTERM)


def test_a_failing_script_leaves_the_others_time_to_hear_of_it() -> None:
    known, unknown = (end_by_script(1, 3, now=10, others_know=know) for know in (True, False))
    assert (known.exit_code, known.reason) == (3, "trainer 1 failed with exit code 3")
    assert known.signal_at > unknown.signal_at > 10


def test_who_is_in_a_hurry_asks_first_and_kills_then() -> None:
    ending = end_by_script(1, 3, now=10, others_know=True)
    ending.hurry(11)
    assert ending.signal_at == 11
    ending.hurry(12)
    assert ending.kill_at == 12


@pytest.mark.parametrize(
    ("codes", "named", "ended_by_us", "exit_code"),
    [
        ({0: 1, 1: 7}, [1], (), 7),  # trainer 0 only heard of the failure, and was quicker
        ({0: 1, 1: -15}, [1], {1}, 1),  # trainer 1 hung until we ended it
        ({0: 1, 1: 0}, [1], (), 1),
        ({0: 1}, [1], (), 1),
        ({0: 1, 1: 7}, [], (), 1),
    ],
)
def test_the_one_that_the_cluster_names_is_to_blame(
    codes: dict[int, int], named: list[int], ended_by_us: set[int], exit_code: int
) -> None:
    first = end_by_script(0, 1, now=10, others_know=True)
    blamed = blame(first, codes, named, ended_by_us)
    assert blamed.exit_code == exit_code
    assert blamed.reason == (first.reason if exit_code == 1 else "trainer 1 failed with exit code 7")


def test_an_interrupt_stays_an_interrupt() -> None:
    interrupt = end_by_signal(signal.SIGINT, now=10)
    assert blame(interrupt, {0: -2, 1: 1}, [1], {0}) is interrupt


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code_of(code) for code in (0, 3, -2, -9)] == [0, 3, 130, 137]
    assert describe_end(-15) == "was ended by SIGTERM"
