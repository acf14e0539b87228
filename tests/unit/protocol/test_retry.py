"""When a client repeats a request, how long it pauses before, and when it gives up."""

from __future__ import annotations

import pytest

from ps_protocol.errors import NotReady, RoundPending, TryAgain
from ps_protocol.retry import (
    MAX_PAUSE_SECONDS,
    Patience,
    RetryPolicy,
    choose_backoff,
    choose_pause,
    read_retry_after,
    request_with_retry,
)


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


@pytest.mark.asyncio
async def test_a_request_is_repeated_after_each_error_of_its_policy() -> None:
    results: list[Exception | str] = [TimeoutError("1"), NotReady("2"), "answer"]
    paused: list[str] = []

    async def attempt() -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def pause(error: Exception) -> None:
        paused.append(str(error))

    assert await request_with_retry(attempt, RetryPolicy((TimeoutError, TryAgain), pause)) == "answer"
    assert paused == ["1", "2"]


@pytest.mark.asyncio
@pytest.mark.parametrize("errors", [(TimeoutError,), (TryAgain,)], ids=["another error", "the policy gives up"])
async def test_any_other_error_and_that_of_the_pause_end_the_request(errors: tuple[type[Exception], ...]) -> None:
    async def attempt() -> None:
        raise TryAgain("full")

    async def give_up(error: Exception) -> None:
        raise error

    with pytest.raises(TryAgain, match="full"):
        await request_with_retry(attempt, RetryPolicy(errors, give_up))


def test_patience_counts_from_the_first_failure_after_a_reset() -> None:
    now = 100.0
    patience = Patience(2.0, lambda: now)
    assert not patience.is_exhausted()
    now = 101.9
    assert not patience.is_exhausted()
    now = 102.0
    assert patience.is_exhausted()
    patience.reset()
    assert not patience.is_exhausted()
    now = 103.0
    patience.start()  # it has started already
    now = 104.0
    assert patience.is_exhausted()
