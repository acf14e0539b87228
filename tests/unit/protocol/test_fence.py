from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import GradpostError
from ps_protocol.fence import Fence
from ps_protocol.vocabulary import PROTOCOL_VERSION

from ...raising import raises_code

FENCE = Fence(PROTOCOL_VERSION, "run-1", 2, "d1ge57", 3, 4, 5, 6, 7)
HEADERS = {"gradpost-fence": "2 run-1 2 d1ge57 3 4 5 6 7"}
ADDRESSEE: dict[str, Any] = {"run": "run-1", "attempt": 2, "plan": "d1ge57", "pserver": 3, "pserver_incarnation": 4}

numbers = st.integers(0, 10**18 - 1)
texts = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128)
fences = st.builds(Fence, st.just(PROTOCOL_VERSION), texts, numbers, texts, *[numbers] * 5)


@given(fences)
def test_headers_and_back(fence: Fence) -> None:
    assert FENCE.to_headers() == HEADERS
    assert Fence.from_headers(fence.to_headers()) == fence


WORDS = HEADERS["gradpost-fence"].split(" ")


def test_a_missing_header_is_named() -> None:
    with raises_code("bad_header", match="the header gradpost-fence is missing"):
        Fence.from_headers({})


def refuse(words: list[str]) -> None:
    with raises_code("bad_header", match="nine words") as caught:
        Fence.from_headers({"gradpost-fence": " ".join(words)})
    assert caught.value.facts["expected"].startswith("protocol run attempt plan")


@pytest.mark.parametrize("words", [WORDS[:-1], [*WORDS, "8"], [*WORDS, ""], ["", *WORDS], WORDS[:1], [""]], ids=str)
def test_another_number_of_words_is_refused(words: list[str]) -> None:
    refuse(words)


@pytest.mark.parametrize("place", [0, 2, 4, 8])
@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1.0", "1e3", "1_0", "0x1", "٣", "²", "nan", "9" * 19, "1\n"], ids=ascii
)
def test_a_word_that_is_no_number_is_refused(place: int, text: str) -> None:
    refuse([*WORDS[:place], text, *WORDS[place + 1 :]])


@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("text", ["", "ä", "a\nb", "\0", "x" * 129], ids=ascii)
def test_a_word_that_is_no_identifier_is_refused(place: int, text: str) -> None:
    refuse([*WORDS[:place], text, *WORDS[place + 1 :]])


def test_another_protocol_is_refused_before_anything_else() -> None:
    with raises_code("unsupported_protocol") as caught:
        Fence.from_headers({"gradpost-fence": f"{PROTOCOL_VERSION + 1} something else"})
    assert caught.value.facts == {"expected": PROTOCOL_VERSION, "actual": str(PROTOCOL_VERSION + 1)}


@given(st.dictionaries(st.sampled_from(sorted(HEADERS)), st.text(max_size=30)))
def test_any_headers_raise_nothing_but_our_errors(changes: dict[str, str]) -> None:
    try:
        fence = Fence.from_headers({**HEADERS, **changes})
    except GradpostError:
        return
    assert Fence.from_headers(fence.to_headers()) == fence


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("run", "run-2", "stale_run"),
        ("attempt", 3, "stale_run"),
        ("plan", "an0ther", "plan_mismatch"),
        ("pserver", 0, "stale_pserver"),
        ("pserver_incarnation", 5, "stale_pserver"),
    ],
)
def test_the_stale_part_of_the_addressee_is_named(field: str, value: Any, code: str) -> None:
    FENCE.check_addressee(**ADDRESSEE)
    with raises_code(code) as caught:
        FENCE.check_addressee(**{**ADDRESSEE, field: value})
    assert str(value) in caught.value.facts["expected"]
    assert str(ADDRESSEE[field]) in caught.value.facts["actual"]
    with raises_code(code) as caught:  # and from the other side
        FENCE._replace(**{field: value}).check_addressee(**ADDRESSEE)
    assert str(value) in caught.value.facts["actual"]
