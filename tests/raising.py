"""Errors that a test expects by their code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ps_protocol.errors import ERRORS, GradpostError


@contextmanager
def raises_code(code: str, match: str | re.Pattern[str] | None = None) -> Iterator[pytest.ExceptionInfo[GradpostError]]:
    """Expect an error of this code, raised as its family."""
    with pytest.raises(ERRORS[code].family, match=match) as caught:
        yield caught
    assert caught.value.code == code
