"""A failpoint does what it was armed for, once, at the passage that was named, and else nothing."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import services
from services.runtime.failpoints import NAMES, arm_failpoints, parse_failpoints, reach_failpoint


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    arm_failpoints("")


@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_a_disk_fails_at_the_passage_that_was_named_and_at_no_other(action, number):
    arm_failpoints(f"apply.before={action}@3")
    reached = []
    for passage in range(1, 6):
        reach_failpoint("apply.after")
        try:
            reach_failpoint("apply.before")
        except OSError as error:
            reached.append((passage, error.errno))
    assert reached == [(3, number)]


@pytest.mark.parametrize("text", ["apply=kill", "apply.before", "apply.before=explode", "apply.before=kill@soon"])
def test_what_does_not_exist_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a failpoint; expected NAME=kill\|stop\|enospc\|eio"):
        parse_failpoints(text)


def test_every_name_is_reached_somewhere_and_no_other():
    sources = "".join(path.read_text() for path in Path(services.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'reach_failpoint\("(.*?)"\)', sources)) == NAMES
