"""A file that was there stays as it was until the new one is whole."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from gradpost.output import CommandError, whole_file


def test_whole_or_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole_file(target) as partial:
        partial.write_text("old")
        assert not target.exists()
    with suppress(KeyboardInterrupt), whole_file(target) as partial:
        partial.write_text("ne")
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert target.read_text() == "old"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(CommandError, match="model cannot be written: No such file or directory"),
        whole_file(tmp_path / "nowhere" / "model") as partial,
    ):
        partial.write_text("")
