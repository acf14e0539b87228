"""requirements.lock is what plain pip needs, on any platform; the others what `make bench` and `make test-all` add."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES, BENCH, ADAPTERS = (
    [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    for name in ("requirements.lock", "requirements-bench.lock", "requirements-adapters.lock")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_line_is_an_exact_public_version() -> None:
    for line in LINES + BENCH + ADAPTERS:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9]+(\.[0-9]+)*(\.?(post|rc|a|b)[0-9]+)?", line), line


def test_it_is_sorted_and_names_nothing_twice() -> None:
    names = [normalise(line.partition("==")[0]) for line in LINES + BENCH + ADAPTERS]
    assert len(set(names)) == len(names)
    for lines in (LINES, BENCH, ADAPTERS):
        assert [line.lower() for line in lines] == sorted(line.lower() for line in lines)


def test_no_accelerator_is_forced_on_anybody() -> None:
    assert not [line for line in LINES + BENCH + ADAPTERS if re.match("nvidia|triton|cuda|pip=", line)]


def test_it_holds_all_that_the_project_declares() -> None:
    declared = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    names = {normalise(line.partition("==")[0]) for line in LINES + BENCH + ADAPTERS}
    missing = {normalise(re.match(r"[A-Za-z0-9._-]+", requirement).group()) for requirement in declared} - names  # type: ignore[union-attr]
    assert not missing
