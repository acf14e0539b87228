"""Small JSON files that prove that they are whole: a flipped bit would still be JSON, with another number in it.

    {"xxh3_128":"1f0c…","content":{"run":"4f1c",…}}

The digest is that of the content's bytes as they stand in the file, so nobody may lay it out anew.
"""

from __future__ import annotations

import re
from typing import TypeVar

import xxhash
from pydantic import ValidationError

from ps_protocol.fields import Message

_MessageT = TypeVar("_MessageT", bound=Message)
_SEALED = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})","content":(.*)\}\n', re.DOTALL)


class DamagedFile(OSError):  # noqa: N818 - the name says what happened
    """A file is missing where one must be, or does not have the digest that was written for it."""

    @classmethod
    def wrong_digest(cls, name: object) -> DamagedFile:
        """Return the error for a file of this name whose digest differs."""
        return cls(f"{name} is damaged: it does not have the digest that was written for it")


def seal(message: Message) -> bytes:
    """What is to be written to a file."""
    content = message.model_dump_json().encode()
    return b'{"xxh3_128":"%s","content":%s}\n' % (xxhash.xxh3_128_hexdigest(content).encode(), content)


def unseal(data: bytes | memoryview, kind: type[_MessageT], name: str) -> _MessageT:
    """What a file of this name says. Raises DamagedFile."""
    found = _SEALED.fullmatch(data)
    if found is None or xxhash.xxh3_128_hexdigest(found[2]).encode() != found[1]:
        raise DamagedFile.wrong_digest(name)
    try:
        return kind.model_validate_json(found[2])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedFile(f"{name} was written by another version: {where}: {first['msg']}") from None
