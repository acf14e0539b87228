"""Requests are the same values at the other end, and headers and metadata that no client sends are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.optimizers import RULES, SCALER_NUMBERS, OptimizerSpec
from ps_protocol.requests import MAX_WAIT_SECONDS, Barrier, Completion, Pull, Pulled

from ...raising import raises_code

SGD = OptimizerSpec("SGD", ({"maximize": False, "nesterov": False},) * 2)
ROUNDS, COUNTS, SQUARES = st.integers(0, 10**18 - 1), st.integers(0, 10**9 - 1), st.floats(0, allow_nan=False)
NUMBERS = st.floats(0, allow_nan=False, allow_infinity=False)
GROUPS = st.fixed_dictionaries(dict.fromkeys(RULES["SGD"].numbers, NUMBERS))
SCALERS = st.none() | st.fixed_dictionaries(dict.fromkeys(SCALER_NUMBERS, NUMBERS))
HYPER_PARAMETERS = st.tuples(GROUPS, GROUPS, SCALERS).map(lambda found: [one for one in found if one is not None])
COMPLETIONS = st.builds(Completion, COUNTS, HYPER_PARAMETERS, st.none() | ROUNDS, COUNTS)
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


@given(st.integers(0, 99), st.dictionaries(st.integers(0, 99), RANKS), SCALERS)
def test_the_outcome_of_a_version_is_the_same_at_the_other_end(
    version: int, skipped: dict, scaler: dict | None
) -> None:
    pulled = Pulled(version, None, {round_: ranks for round_, ranks in skipped.items() if round_ <= version}, scaler)
    assert Pulled.from_metadata(version, pulled.to_metadata()) == pulled


def test_the_metadata_of_a_frame_that_is_not_the_last_one_is_no_completion() -> None:
    assert Completion.from_metadata({}, SGD) is None


@pytest.mark.parametrize("key", ["num_blocks", "computed_on", "num_slots"])
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
