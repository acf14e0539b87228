from __future__ import annotations

import ast
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol import errors
from ps_protocol.errors import ERRORS, BadInput, GradpostError, error_from_problem

from ..test_project import ROOT
from .strategies import few, json_values

CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, GradpostError)
}


def test_every_class_has_a_code_of_its_own() -> None:
    assert [ERRORS[kind.code].family for kind in CLASSES.values()] == list(CLASSES.values())


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_is_rebuilt_on_the_other_side(code: str) -> None:
    known = ERRORS[code]
    error = known.family("round 3 is over", code=code, expected=5, actual="3", current={"round": 5})
    problem = json.loads(json.dumps(error.to_problem()))
    assert problem["status"] == known.status
    assert problem["type"] == "urn:gradpost:error:" + code
    assert problem["may_be_retried"] is known.may_be_retried
    rebuilt = error_from_problem(problem)
    assert (type(rebuilt), rebuilt.code) == (known.family, code)
    assert rebuilt.facts == error.facts
    assert str(rebuilt) == str(error) == "round 3 is over (expected 5; actual 3)"
    assert rebuilt.to_problem() == error.to_problem()


def test_errors_are_raised_with_codes_of_their_family() -> None:
    raised = set()
    for folder in ("ps_config", "ps_protocol", "services", "trainer_client", "gradpost"):
        for file in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(file.read_text())):
                name = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
                for keyword in call.keywords if name in CLASSES else ():
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        assert ERRORS[keyword.value.value].family is CLASSES[name], f"{file}:{call.lineno}"
                        raised.add(keyword.value.value)
    assert len(raised) > 30


def test_a_fact_cannot_pose_as_a_member_of_the_document() -> None:
    problem = errors.StaleRound("over", status=200, title="fine", may_be_retried=True).to_problem()
    assert (problem["status"], problem["title"], problem["may_be_retried"]) == (409, "stale round", False)


def test_a_code_that_is_not_known() -> None:
    error = error_from_problem({"code": "too_new", "detail": "what?", "status": 409})
    assert type(error) is GradpostError
    assert error.facts == {"unknown_code": "too_new"}


@pytest.mark.parametrize(
    ("problem", "text"), [({}, "no detail was given"), ({"title": "Bad Gateway", "status": 502}, "Bad Gateway")]
)
def test_a_document_without_a_code(problem: dict[str, Any], text: str) -> None:
    error = error_from_problem(problem)
    assert type(error) is GradpostError
    assert error.detail == text


@few
@given(
    st.dictionaries(st.sampled_from(["code", "detail", "title", "status", "self"]) | st.text(max_size=4), json_values)
)
def test_any_document_becomes_an_error(problem: dict[str, Any]) -> None:
    error = error_from_problem(problem)
    assert isinstance(error, GradpostError)
    assert str(error)
    error.to_problem()


def test_an_error_survives_pickling() -> None:
    """A process pool returns errors pickled."""
    error = pickle.loads(pickle.dumps(BadInput("w", code="wrong_shape", expected=[3], actual=[4])))  # noqa: S301
    assert (type(error), error.code, error.detail) == (BadInput, "wrong_shape", "w")
    assert error.facts == {"expected": [3], "actual": [4]}
