"""What `make audit` makes of pip-audit's answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="is not in a source distribution")

FINE = {"name": "fine", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "0.1", "vulns": [{"id": "CVE-1", "fix_versions": ["0.2"], "aliases": []}]}
UNKNOWN = {"name": "unknown", "skip_reason": "Dependency not found"}


def audit(folder: Path, *, out: str = "", err: str = "", code: int = 0) -> tuple[int, str]:
    """Run the script with a pip-audit that says this."""
    script = f"import sys\nassert '--requirement' in sys.argv\nprint({out!r})\nprint({err!r}, file=sys.stderr)"
    (folder / "pip_audit.py").write_text(f"{script}\nsys.exit({code})")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.run(
        [sys.executable, "-P", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    return process.returncode, process.stdout + process.stderr


def report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def test_nothing_known(tmp_path: Path) -> None:
    code, said = audit(tmp_path, out=report(FINE, FINE))
    assert (code, said) == (0, "audit: 2 packages looked up, 0 with known vulnerabilities\n")


def test_a_vulnerability_fails(tmp_path: Path) -> None:
    code, said = audit(tmp_path, out=report(FINE, BAD), code=1)
    assert code == 1
    assert "audit: bad 0.1: CVE-1, mended in 0.2\n" in said


def test_so_does_what_was_not_looked_up(tmp_path: Path) -> None:
    code, said = audit(tmp_path, out=report(FINE, UNKNOWN))
    assert code == 1
    assert "unknown was not looked up: Dependency not found" in said


def test_no_way_to_the_advisories_is_said(tmp_path: Path) -> None:
    code, said = audit(tmp_path, err="Traceback\nrequests.exceptions.ConnectionError: no name api.osv.dev", code=1)
    assert code == 0
    assert said.startswith("audit: NOT DONE, since osv.dev cannot be reached: requests.exceptions.ConnectionError")


@pytest.mark.parametrize("code", [0, 1])
def test_an_audit_that_fails_otherwise_fails(tmp_path: Path, code: int) -> None:
    assert audit(tmp_path, err="KeyError: 'name'", code=code)[0] == 1
