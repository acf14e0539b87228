"""docs/metrics.md: what it tells Prometheus is a configuration, with tokens and without."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ..unit.protocol.test_certificates import Authority
from .markdown import examples, read
from .stage import run_gradpost

OPEN, CLOSED = (block.text for block in examples(read("metrics.md"), "yaml"))

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")


def test_it_is_a_configuration(tmp_path: Path) -> None:
    check(OPEN, tmp_path)


def test_both_jobs_and_the_discovery_take_what_is_added(tmp_path: Path) -> None:
    run_gradpost("token", "create", "--dir", str(tmp_path / "tokens"))
    Authority(tmp_path)
    added = yaml.safe_load(CLOSED.replace("/run/gradpost", str(tmp_path)))
    configuration = yaml.safe_load(OPEN)
    for job in configuration["scrape_configs"]:
        job.update(added)
        for discovery in job.get("http_sd_configs", []):
            discovery.update(added)
    check(yaml.safe_dump(configuration), tmp_path)


def check(text: str, folder: Path) -> None:
    """The files that are named have to be there, too."""
    (folder / "prometheus.yml").write_text(text)
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
