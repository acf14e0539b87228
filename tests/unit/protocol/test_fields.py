"""Members of messages are what their schemas say: JSON's types, within bounds that openapi.json shows."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ps_protocol import membership, messages
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
from ps_protocol.membership import MembershipMessage

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


def test_what_is_sent_is_what_is_received() -> None:
    consistency = TypeAdapter(Consistency)
    for sent in (
        Consistency(),
        Consistency("async", max_delay=2),
        Consistency("ssp", compensation="dc", dc_lambda=0.5),
    ):
        assert consistency.validate_json(consistency.dump_json(sent)) == sent


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
    classes = {**vars(messages), **vars(membership)}.values()
    found = [cls for cls in classes if inspect.isclass(cls) and issubclass(cls, Message)]
    assert len(found) > 30
    return [cls for cls in found if cls is not MembershipMessage]


@pytest.mark.parametrize("message", all_messages())
def test_every_member_of_a_message_has_a_bound(message: type[Message]) -> None:
    document = message.model_json_schema()
    assert list(find_unbounded(document, document, message.__name__)) == []
