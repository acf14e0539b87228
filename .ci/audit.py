"""Look up known vulnerabilities of the packages in requirements.lock at osv.dev.

The exit code is 1 after a vulnerability or a failed audit. If osv.dev cannot be reached, a message says so and the exit
code is 0, so that CI works without the internet. Arguments are passed to pip-audit, such as `--ignore-vuln ID`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[1] / "requirements.lock"
# PyPI's own advisories are not used: a mirror answers 404 for them, which pip-audit treats as "none known".
COMMAND = (
    "-m pip_audit --vulnerability-service osv --no-deps --disable-pip --format json --progress-spinner off --timeout 15"
)
UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "SSLError", "Could not connect")


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    process = subprocess.run(
        [sys.executable, *COMMAND.split(), "--requirement", str(LOCK), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        packages: list[dict[str, Any]] = json.loads(process.stdout)["dependencies"]
    except ValueError:
        last_line = process.stderr.strip().rpartition("\n")[2]
        if any(word in last_line for word in UNREACHABLE):
            print(f"audit: NOT DONE, as osv.dev cannot be reached: {last_line:.300}")
            return 0
        print(process.stderr, file=sys.stderr)
        return process.returncode or 1
    skipped = [package for package in packages if "vulns" not in package]
    vulnerable = [package for package in packages if package.get("vulns")]
    for package in skipped:
        print(f"audit: {package['name']} was not looked up: {package.get('skip_reason')}")
    for package in vulnerable:
        for found in package["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "no version"
            print(f"audit: {package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    print(f"audit: {len(packages) - len(skipped)} packages looked up, {len(vulnerable)} with known vulnerabilities")
    return 1 if vulnerable or skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
