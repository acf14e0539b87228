"""Requests, fences and norms are the same values at the other end; what no client sends is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import GradpostError
from ps_protocol.fence import Fence
from ps_protocol.norms import MAX_TEXT, AgreedNorm, ShardNorm, agree, clip_coefficient
from ps_protocol.optimizers import RULES, OptimizerSpec
from ps_protocol.requests import MAX_WAIT_SECONDS, Barrier, Completion, Pull, Pulled
from ps_protocol.vocabulary import PROTOCOL_VERSION

from ...raising import raises_code

SGD = OptimizerSpec("SGD", ({"maximize": False, "nesterov": False},) * 2)
ROUNDS, COUNTS, SQUARES = st.integers(0, 10**18 - 1), st.integers(0, 10**9 - 1), st.floats(0, allow_nan=False)
NUMBERS = st.floats(0, allow_nan=False, allow_infinity=False)
GROUPS = st.fixed_dictionaries(dict.fromkeys(RULES["SGD"].numbers, NUMBERS))
HYPER_PARAMETERS = st.lists(GROUPS, min_size=2, max_size=2)
COMPLETIONS = st.builds(Completion, COUNTS, HYPER_PARAMETERS, st.none() | ROUNDS)
BARRIERS = st.builds(Barrier, st.just("batch"), st.booleans())
NORMS = st.builds(
    lambda digest, squares: AgreedNorm(ShardNorm(digest, min(squares)), max(squares)),
    st.text("0123456789abcdef", min_size=1, max_size=32),
    st.tuples(SQUARES, SQUARES),
)
WAITS = st.integers(0, int(MAX_WAIT_SECONDS * 4)).map(lambda quarters: quarters / 4)
PULLS = st.builds(
    Pull, ROUNDS, st.none() | BARRIERS, st.just(()), st.none() | ROUNDS, st.none() | NORMS, wait_seconds=WAITS
)
RANKS = st.lists(COUNTS, max_size=3).map(tuple)


@given(COMPLETIONS)
def test_a_completion_is_the_same_at_the_other_end(completion: Completion) -> None:
    assert Completion.from_metadata(completion.to_metadata(), SGD) == completion


@given(PULLS, st.lists(st.text(min_size=1)).map(tuple))
def test_a_pull_is_the_same_at_the_other_end(pull: Pull, names: tuple[str, ...]) -> None:
    asked = replace(pull, names=names)
    assert Pull.from_headers(pull.round, asked.to_headers()) == pull
    assert json.loads(asked.body or b"[]") == list(names)


@given(st.builds(Barrier, st.sampled_from(["batch", "fetch"]), st.booleans()))
def test_a_barrier_is_the_same_at_the_other_end(barrier: Barrier) -> None:
    assert Barrier.from_headers(barrier.to_headers()) == barrier


@given(st.integers(0, 99), RANKS)
def test_the_outcome_of_a_version_is_the_same_at_the_other_end(version: int, skipped_for: tuple[int, ...]) -> None:
    pulled = Pulled(version, None, skipped_for)
    assert Pulled.from_metadata(version, pulled.to_metadata()) == pulled


def test_the_metadata_of_a_frame_that_is_not_the_last_one_is_no_completion() -> None:
    assert Completion.from_metadata({}, SGD) is None


@pytest.mark.parametrize("key", ["num_blocks", "computed_on"])
@pytest.mark.parametrize("text", ["", "-1", "1.0", "٧", "1" * 19])
def test_numbers_of_a_completion_are_digits(key: str, text: str) -> None:
    metadata = Completion(1, [dict.fromkeys(RULES["SGD"].numbers, 0.0)] * 2).to_metadata()
    with raises_code("malformed_frame"):
        Completion.from_metadata({**metadata, key: text}, SGD)


@pytest.mark.parametrize(
    "headers",
    [
        {"gradpost-barrier": "fetch"},
        {"gradpost-barrier": "both"},
        {"gradpost-barrier": "batch", "gradpost-verdict": "perhaps"},
        {"gradpost-have": "-1"},
        {"gradpost-wait-seconds": "nan"},
        {"gradpost-wait-seconds": f"{MAX_WAIT_SECONDS + 1}"},
        {"gradpost-norm": "5f0c 2.0 1.0"},
    ],
    ids=str,
)
def test_headers_of_a_pull_are_checked(headers: dict[str, str]) -> None:
    with raises_code("bad_header"):
        Pull.from_headers(1, headers)


# ---------------------------------------------------------------------- fence


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


NO_NUMBERS = ["", "-1", "+1", "1.0", "1e3", "1_0", "0x1", "٣", "²", "nan", "9" * 19, "1\n"]
NO_IDENTIFIERS = ["", "ä", "a\nb", "\0", "x" * 129]
MALFORMED = [
    *([*WORDS[:place], text, *WORDS[place + 1 :]] for place in (0, 2, 4, 8) for text in NO_NUMBERS),
    *([*WORDS[:place], text, *WORDS[place + 1 :]] for place in (1, 3) for text in NO_IDENTIFIERS),
    *(WORDS[:-1], [*WORDS, "8"], [*WORDS, ""], ["", *WORDS], WORDS[:1], [""]),
]


@pytest.mark.parametrize("words", MALFORMED, ids=ascii)
def test_a_fence_of_other_words_is_refused(words: list[str]) -> None:
    with raises_code("bad_header", match="nine words") as caught:
        Fence.from_headers({"gradpost-fence": " ".join(words)})
    assert caught.value.facts["expected"].startswith("protocol run attempt plan")


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


# ---------------------------------------------------------------------- norms


DIGEST = "5f0c9e7d21ab0042"
squares = st.floats(min_value=0, max_value=1e90)  # of a float32 gradient it is far less
any_squares = squares | st.sampled_from([math.nan, math.inf])


@pytest.mark.clip
@given(st.lists(any_squares, min_size=1, max_size=8), st.randoms())
def test_the_sum_does_not_depend_on_the_order(parts: list[float], chance: object) -> None:
    norms = [ShardNorm(DIGEST, part) for part in parts]
    agreed = agree(norms)
    chance.shuffle(norms)  # type: ignore[attr-defined]
    other = agree(norms)
    assert agreed is not None
    assert other is not None
    assert {repr(one.total) for one in (*agreed, *other)} == {repr(agreed[0].total)}
    assert [repr(one.own.sum_of_squares) for one in agreed] == [repr(part) for part in parts]


@pytest.mark.clip
@given(st.lists(any_squares, min_size=1, max_size=4))
def test_a_norm_survives_its_header_exactly(parts: list[float]) -> None:
    for one in agree([ShardNorm(DIGEST, part) for part in parts]) or ():
        header = one.to_header()
        assert len(header) <= MAX_TEXT
        back = AgreedNorm.from_header(header)
        assert back.own.is_same(one.own)
        assert repr(back.total) == repr(one.total)
        assert math.isnan(back.norm) or back.norm >= 0


@pytest.mark.clip
@pytest.mark.parametrize(
    "text",
    [
        "",
        DIGEST,
        f"{DIGEST} 1.0 2.0 3.0",
        " 1.0 2.0",
        "di/gest 1.0 2.0",
        f"{DIGEST} 1.0 zwei",
        f"{DIGEST} -1.0 2.0",
        f"{DIGEST} 2.0 1.0",  # a sum that is smaller than its part
        f"{DIGEST} nan 1.0",
        f"{DIGEST} nan inf",
        f"{DIGEST} 1.0 -inf",
        f"{DIGEST} 1.0 {'2' * MAX_TEXT}",
        f"{DIGEST} 1.0 ²",
    ],
)
def test_a_malformed_norm_is_a_bad_header(text: str) -> None:
    with raises_code("bad_header", match="gradpost-norm"):
        AgreedNorm.from_header(text)


@pytest.mark.clip
def test_norms_of_different_contributions_are_not_added() -> None:
    assert agree([ShardNorm("a", 1.0), ShardNorm("b", 1.0)]) is None
    assert not ShardNorm("a", 1.0).is_same(ShardNorm("b", 1.0))
    assert not ShardNorm("a", 1.0).is_same(ShardNorm("a", math.nextafter(1.0, 2.0)))
    assert ShardNorm("a", math.nan).is_same(ShardNorm("a", math.nan))


@pytest.mark.clip
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_the_clip_coefficient_is_that_of_torch(values: list[float], max_norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    expected = float(torch.nn.utils.clip_grad_norm_([parameter], max_norm))
    norm = math.sqrt(math.fsum(value * value for value in values))
    assert norm == pytest.approx(expected)
    clipped = torch.tensor(values, dtype=torch.float64) * clip_coefficient(norm, max_norm)
    torch.testing.assert_close(parameter.grad, clipped)


@pytest.mark.clip
def test_the_clip_coefficient_of_a_norm_that_is_not_finite_or_0_is_that_of_torch() -> None:
    assert clip_coefficient(math.inf, 1.0) == 0.0
    assert math.isnan(clip_coefficient(math.nan, 1.0))
    assert clip_coefficient(0.0, 1e-9) == pytest.approx(1e-3)  # as torch has it: the norm is never quite 0
