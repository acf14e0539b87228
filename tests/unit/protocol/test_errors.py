from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol import errors
from ps_protocol.errors import ERRORS, GradpostError, TryAgain, error_from_problem

from .strategies import few, json_values


def tree(cls: type[GradpostError] = GradpostError) -> Iterator[type[GradpostError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


CLASSES = list(tree())


def test_every_class_has_a_code_of_its_own() -> None:
    assert len({cls.code for cls in CLASSES}) == len(CLASSES)
    assert list(ERRORS.values()) == CLASSES
    assert all(ERRORS[cls.code] is cls for cls in CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_code_is_documented_and_well_formed(cls: type[GradpostError]) -> None:
    assert "code" in vars(cls)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
    assert (vars(cls).get("__doc__") or "").endswith(".")
    HTTPStatus(cls.status)
    assert cls.status >= 400


@pytest.mark.parametrize("cls", CLASSES)
def test_the_status_fits_the_family(cls: type[GradpostError]) -> None:
    if issubclass(cls, errors.BadInput):
        assert 400 <= cls.status < 500 or cls.status == HTTPStatus.NOT_IMPLEMENTED
        assert not cls.may_be_retried
    elif issubclass(cls, errors.Conflict):
        assert cls.status == HTTPStatus.CONFLICT
    elif issubclass(cls, errors.TryAgain):
        assert cls.status == (HTTPStatus.REQUEST_TIMEOUT if cls is errors.SlowBody else HTTPStatus.SERVICE_UNAVAILABLE)
        assert cls.may_be_retried
    elif issubclass(cls, errors.Ended):
        assert not cls.may_be_retried


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_is_rebuilt_on_the_other_side(cls: type[GradpostError]) -> None:
    error = cls("round 3 is over", expected=5, actual="3", current={"round": 5})
    problem = json.loads(json.dumps(error.to_problem()))
    assert problem["status"] == cls.status
    assert problem["type"] == "urn:gradpost:error:" + cls.code
    assert problem["may_be_retried"] is cls.may_be_retried
    rebuilt = error_from_problem(problem)
    assert type(rebuilt) is cls
    assert rebuilt.facts == error.facts
    assert str(rebuilt) == str(error) == "round 3 is over (expected 5; actual 3)"
    assert rebuilt.to_problem() == error.to_problem()


def test_a_fact_cannot_pose_as_a_member_of_the_document() -> None:
    problem = errors.StaleRound("over", status=200, code="fine", may_be_retried=True).to_problem()
    assert (problem["status"], problem["code"], problem["may_be_retried"]) == (409, "stale_round", False)


def test_a_fact_may_be_called_like_a_parameter() -> None:
    problem = {"code": "not_found", "detail": "no such path", "self": 1, "cls": 2, "problem": 3}
    assert error_from_problem(problem).facts == {"self": 1, "cls": 2, "problem": 3}


@pytest.mark.parametrize(("may_be_retried", "cls"), [(True, TryAgain), (False, GradpostError), ("yes", GradpostError)])
def test_the_code_of_a_newer_server(may_be_retried: Any, cls: type[GradpostError]) -> None:
    error = error_from_problem({"code": "too_new", "detail": "what?", "may_be_retried": may_be_retried})
    assert type(error) is cls
    assert error.facts == {"unknown_code": "too_new"}


@pytest.mark.parametrize(
    ("problem", "text"), [({}, "no detail was given"), ({"title": "Bad Gateway", "status": 502}, "Bad Gateway")]
)
def test_the_document_of_a_stranger(problem: dict[str, Any], text: str) -> None:
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


def test_the_tree_in_the_docstring_names_the_families() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert drawn == [cls.__name__ for cls in GradpostError.__subclasses__() if cls.__module__ == errors.__name__]


def test_an_error_survives_pickling() -> None:
    """So that it can leave a process pool."""
    error = pickle.loads(pickle.dumps(errors.WrongShape("w", expected=[3], actual=[4])))  # noqa: S301
    assert (type(error), error.detail, error.facts) == (errors.WrongShape, "w", {"expected": [3], "actual": [4]})
