"""How much memory there is: the machine's, or the container's if that is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime import process
from services.runtime.process import usable_memory_bytes


def test_the_least_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    monkeypatch.setattr(process, "_CGROUP_FILES", (new, old))
    whole = usable_memory_bytes()  # without any
    assert whole > 1 << 20
    new.write_text("max\n")
    assert usable_memory_bytes() == whole
    old.write_text("9223372036854771712\n")  # what version 1 says when there is none
    assert usable_memory_bytes() == whole
    new.write_text("1048576\n")
    assert usable_memory_bytes() == 1048576
