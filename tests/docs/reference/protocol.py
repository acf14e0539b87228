"""The tables of messages and error codes in docs/protocol-reference.md."""

from __future__ import annotations

import inspect
import re

from ps_protocol import messages
from ps_protocol.errors import ERRORS
from ps_protocol.fields import Message
from ps_protocol.membership import Controls, MembershipMessage

from .tables import put_table

# People read these, and no client depends on their members.
INSPECTION = {"PserverState", "PserverStatus", "TrainerStatus", "ClusterStatus", "ShardSummary", "RunSummary"}


def renew(text: str) -> str:
    """Return the page with both tables as they are in the code."""
    classes = [
        cls
        for name, cls in {**vars(messages), "Controls": Controls}.items()
        if inspect.isclass(cls) and issubclass(cls, Message) and cls not in (Message, MembershipMessage)
        and cls.__module__.startswith("ps_protocol") and name not in INSPECTION
    ]  # fmt: skip
    names = {cls.__name__ for cls in classes}
    members = [(f"`{cls.__name__}`", _list_members(cls, names)) for cls in classes]
    errors = [
        (f"`{code}`", f"`{error.family.__name__}`", str(error.status), "yes" if error.may_be_retried else "no",
         error.meaning)
        for code, error in ERRORS.items()
    ]  # fmt: skip
    text = put_table(text, "Messages", ("message", "members"), members)
    return put_table(text, "Error codes", ("code", "class", "status", "retry", "meaning"), errors)


def _list_members(cls: type[Message], names: set[str]) -> str:
    """Return the members of a message, with a question mark if optional, and the message that each contains."""
    schema, listed = cls.model_json_schema(), []
    for name, member in schema["properties"].items():
        nested = [word for word in re.findall(r"#/\$defs/(\w+)", str(member)) if word in names]
        mark = "" if name in schema.get("required", ()) else "?"
        listed.append(f"`{name}`{mark}" + (f" (`{nested[0]}`)" if nested else ""))
    return " ".join(listed)
