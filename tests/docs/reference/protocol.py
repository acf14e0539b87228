"""The tables of messages and error codes in docs/protocol-reference.md."""

from __future__ import annotations

import inspect
import re

from pydantic.fields import FieldInfo

from ps_protocol import messages
from ps_protocol.errors import ERRORS

from .tables import put_table

# People read these, and no client depends on their members.
INSPECTION = {"PserverState", "PserverStatus", "TrainerStatus", "ClusterStatus", "ShardSummary", "RunSummary"}


def renew(text: str) -> str:
    """Return the page with both tables as they are in the code."""
    classes = [
        cls
        for name, cls in vars(messages).items()
        if inspect.isclass(cls) and issubclass(cls, messages.Message) and cls is not messages.Message
        and cls.__module__.startswith("ps_protocol") and name not in INSPECTION
    ]  # fmt: skip
    names = {cls.__name__ for cls in classes}
    members = [
        (f"`{cls.__name__}`", " ".join(_member(key, field, names) for key, field in cls.model_fields.items()))
        for cls in classes
    ]
    errors = [
        (f"`{code}`", f"`{error.family.__name__}`", str(error.status), "yes" if error.may_be_retried else "no",
         error.meaning)
        for code, error in ERRORS.items()
    ]  # fmt: skip
    text = put_table(text, "Messages", ("message", "members"), members)
    return put_table(text, "Error codes", ("code", "class", "status", "retry", "meaning"), errors)


def _member(key: str, field: FieldInfo, messages: set[str]) -> str:
    """Return the member's name, a question mark if it is optional, and the message that it contains."""
    nested = [word for word in re.findall(r"\w+", str(field.annotation)) if word in messages]
    return f"`{key}`" + ("" if field.is_required() else "?") + (f" (`{nested[0]}`)" if nested else "")
