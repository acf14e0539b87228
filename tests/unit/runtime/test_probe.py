"""The probe that a kubelet runs where a certificate has to be shown."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ..protocol.test_certificates import Authority
from .support import Sample, running

ROOT = Path(__file__).parents[3]


async def probe(url: str, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code and what it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "services.runtime.probe", url),
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.asyncio
async def test_a_probe_shows_the_certificate_of_the_environment(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.issue("service")
    names = {"CA": files.ca, "CLIENT_CERT": files.cert, "CLIENT_KEY": files.key}
    environ = {f"GRADPOST_TLS_{name}": str(path) for name, path in names.items()}
    sample = Sample()
    serving = {"tls_client_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
    async with running(sample.make_app(), **serving) as service:
        url = f"https://localhost:{service.address.rpartition(':')[2]}/readyz"
        assert await probe(url, environ) == (0, "")
        code, said = await probe(url, {"GRADPOST_TLS_CA": environ["GRADPOST_TLS_CA"]})
        assert code == 1, said  # no certificate
        sample.missing = "reader"
        assert await probe(url, environ) == (1, f"{url}: HTTP Error 503: Service Unavailable\n")
    code, said = await probe(url, environ)
    assert (code, "refused" in said) == (1, True)
