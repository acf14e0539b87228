"""A client that is told when to come back does not come earlier, nor with all the others."""

from __future__ import annotations

import pytest

from ps_protocol.errors import NotReady, RoundPending, TryAgain
from trainer_client.pauses import MAX_PAUSE_SECONDS, choose_backoff, choose_pause, read_retry_after


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0), ("2", 2), ("86400", MAX_PAUSE_SECONDS), ("9" * 5000, MAX_PAUSE_SECONDS),
        (None, None), ("", None), ("-1", None), ("1.5", None), ("²", None), ("Fri, 31 Dec 2027 23:59:59 GMT", None),
    ],
)  # fmt: skip
def test_the_header(text: str | None, seconds: float | None) -> None:
    assert read_retry_after(text) == seconds


def test_a_pause_is_as_long_as_was_said_and_up_to_twice_as_long() -> None:
    answer = TryAgain("full", code="overloaded")
    answer.retry_after_seconds = 2.0
    pauses = [choose_pause(answer, 0.02) for _ in range(1000)]
    assert min(pauses) >= 2
    assert max(pauses) <= 4
    assert min(pauses) < 2.2  # spread over the whole range
    assert max(pauses) > 3.8


@pytest.mark.parametrize("kind", [NotReady, RoundPending])
def test_who_waits_for_others_only_polls(kind: type[NotReady | RoundPending]) -> None:
    answer = kind("wait")
    answer.retry_after_seconds = 1.0
    assert choose_pause(answer, 0.02) == 0.02


def test_without_a_word_it_is_the_least() -> None:
    assert choose_pause(TryAgain("full", code="overloaded"), 0.25) == 0.25
    answer = TryAgain("full", code="queue_full")
    answer.retry_after_seconds = 0.0
    assert choose_pause(answer, 0.25) == 0.25


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 0.05), (3, 0.2), (6, 1.6), (7, 2.0), (10_000, 2.0)])
def test_the_pause_after_no_answer_is_random_up_to_a_limit_that_doubles(attempt: int, seconds: float) -> None:
    pauses = [choose_backoff(attempt) for _ in range(1000)]
    assert 0 <= min(pauses) < 0.1 * seconds
    assert 0.9 * seconds < max(pauses) <= seconds
