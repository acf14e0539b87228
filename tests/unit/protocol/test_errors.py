"""Errors and messages on the wire."""

from __future__ import annotations

import ast
import inspect
import json
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ps_protocol import errors, fields, membership, messages, requests
from ps_protocol.consistency import Consistency
from ps_protocol.errors import ERRORS, BadInput, GradpostError, error_from_problem
from ps_protocol.fields import (
    MAX_NOTE,
    ByOrdinal,
    Flag,
    Message,
    Note,
    Number,
    Ordinal,
    OrdinalText,
    Real,
)
from ps_protocol.membership import RegisterPserver
from ps_protocol.messages import JoinTrainer, PserverInfo, TrainerHeartbeat

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


# ---------------------------------------------------------------------- messages


NUMBERS = {"mode": "ssp", "max_staleness": 3, "dc_lambda": 1, "compensation": "dc"}


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (Ordinal, [0, 7], [True, "0", 0.0, -1, 10**18, 10**400, None]),
        (Flag, [True], [0, 1, "true", None]),
        (Real, [0.5, 1], [True, "0.5", "NaN", float("inf"), 10**400]),
        (Number, [0.5, 1, "NaN", "-Infinity"], [True, "0.5", "nan", 10**400]),
        (OrdinalText, ["0", "17"], ["1_0", "1.0", "+1", " 1", "-0", "9" * 19]),
        (ByOrdinal[Ordinal], [{"0": 1}], [{"-1": 1}, {"+1": 1}, {"1.0": 1}, {" 1": 1}, {"9" * 19: 1}, {"0": "1"}]),
        (
            Consistency,
            [{}, NUMBERS],
            [{**NUMBERS, "max_staleness": value} for value in (True, "3", 3.0, 10**20)],
        ),
        (Consistency, [], [{**NUMBERS, "wait_for_apply": 0}, {**NUMBERS, "dc_lambda": "1"}, {"mode": 1}, [], 1]),
    ],
)
def test_a_member_is_of_its_own_type(kind: Any, right: list[Any], wrong: list[Any]) -> None:
    adapter = TypeAdapter(kind)
    for value in right:
        assert repr(adapter.validate_python(value)) == repr(adapter.validate_json(json.dumps(value)))
    for value in wrong:
        for validate in (adapter.validate_python, lambda value: adapter.validate_json(json.dumps(value))):
            with pytest.raises(ValidationError):
                print(value, validate(value))


def test_an_answer_may_have_members_of_a_later_version_and_a_request_may_not() -> None:
    info = {"index": 0, "incarnation": 1, "address": "http://127.0.0.1:1", "http2": True, "epoch": 3}
    document = json.dumps({"pserver": info, "standbys": [1]}).encode()

    class Answer(Message):
        pserver: PserverInfo

    assert Answer.from_answer(document).pserver.incarnation == 1
    for unknown in ("epoch", "standbys"):
        with pytest.raises(ValidationError, match=unknown):
            Answer.model_validate_json(document)


def test_a_note_is_cut() -> None:
    assert len(TypeAdapter(Note).validate_python("x" * 2 * MAX_NOTE)) == MAX_NOTE


# Free objects: a plan is checked by SlicePlan, a problem document is what a service has made; both are a message's
# size at most.
UNBOUNDED = {"plan", "failure"}


def find_unbounded(schema: Any, document: Any, where: str) -> Iterator[str]:
    """Yield the places below a schema where a text, a number or a collection has no bound."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from find_unbounded(document["$defs"][name], document, where)
        return
    for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
        for branch in schema.get(key, ()):
            yield from find_unbounded(branch, document, where)
    kind = schema.get("type")
    bounds = {
        "string": {"maxLength", "enum", "const", "pattern"},
        "integer": {"maximum"},
        "array": {"maxItems"},
        "object": {"maxProperties", "properties"},
    }
    if kind in bounds and not bounds[kind] & schema.keys():
        yield f"{where}: {schema}"
    if isinstance(schema.get("items"), dict):
        yield from find_unbounded(schema["items"], document, f"{where}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from find_unbounded(schema["additionalProperties"], document, f"{where}{{}}")
        if "propertyNames" in schema:
            yield from find_unbounded({"type": "string", **schema["propertyNames"]}, document, f"{where} name")
        else:
            yield f"{where}: names"
    for name, member in schema.get("properties", {}).items():
        if name not in UNBOUNDED:
            yield from find_unbounded(member, document, f"{where}.{name}")


def all_messages() -> list[type[Message]]:
    classes = {**vars(messages), **vars(fields), **vars(membership), **vars(requests)}.values()
    found = [cls for cls in classes if inspect.isclass(cls) and issubclass(cls, Message)]
    assert len(found) > 30
    return found


@pytest.mark.parametrize("message", all_messages())
def test_every_member_of_a_message_has_a_bound(message: type[Message]) -> None:
    document = message.model_json_schema()
    assert list(find_unbounded(document, document, message.__name__)) == []


# ---------------------------------------------------------------- single messages


def test_a_loss_that_is_not_a_number_survives_the_wire() -> None:
    """Otherwise the heartbeat of a diverging run would be refused, and its trainer would be lost."""
    sent = TrainerHeartbeat(run="r", incarnation=1, round=3, results={"loss": math.nan, "norm": math.inf, "lr": 0.5})
    received = TrainerHeartbeat.model_validate_json(sent.model_dump_json())
    assert math.isnan(received.results["loss"])
    assert received.results["norm"] == math.inf
    assert received.results["lr"] == 0.5


PROCESS = {"protocol": 2, "instance": "a process"}


@pytest.mark.parametrize(
    "address", ["http://[", "http://", "ftp://a", "a:1", "http://a:99999", "http://a/?b", "http://a b", "http://a:0"]
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ValidationError):
        JoinTrainer.model_validate({**PROCESS, "metrics_address": address})
    with pytest.raises(ValidationError):
        RegisterPserver.model_validate({**PROCESS, "address": address, "http2": True})


def test_an_address_may_have_a_path_unless_it_serves_metrics() -> None:
    address = "https://[::1]:7071/prefix/"
    assert RegisterPserver.model_validate({**PROCESS, "address": address, "http2": True}).address == address
    for wrong in (address, "http://me@a"):
        with pytest.raises(ValidationError, match="a host and a port"):
            JoinTrainer.model_validate({**PROCESS, "metrics_address": wrong})


@pytest.mark.parametrize("name", ["", "gradpost-" + 31 * "0", "gradpost-" + 32 * "0" + "\n", "/tmp/X0", 41 * "0"])
def test_the_socket_name_of_another_program_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        PserverInfo(index=0, address="http://a", incarnation=1, http2=True, local=name)
