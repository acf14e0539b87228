"""Messages and their members: the types of JSON, within the bounds of openapi.json."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ps_protocol import fields, membership, messages, requests
from ps_protocol.consistency import Consistency
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
