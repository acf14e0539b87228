"""A trainer's log on a terminal shows what the coordinator says of others, and nothing of it is obeyed."""

from __future__ import annotations

import io
import sys

import pytest

from trainer_client.logs import make_log


def test_text_of_others_makes_no_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    make_log(trainer=0).info("trainer 1 failed: no data\nforged\x1b[2A", error="a\nb")
    assert terminal.getvalue().count("\n") == 1
    assert "\x1b[2A" not in terminal.getvalue()
