"""TLS of a service: client certificates, handshakes that do not end, renewed certificates, and the probe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from ps_config.certificates import TlsFiles, client_context
from ps_config.control_client import make_control_client
from services.runtime.security import make_peer_client
from services.runtime.settings import ServiceSettings

from ..protocol.test_certificates import Authority, serial
from .support import Sample, running


def serving(files: TlsFiles) -> dict[str, Path | None]:
    return {"tls_client_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}


async def serial_of(address: str, files: TlsFiles) -> int:
    """The certificate that a new connection gets to see."""
    host, port = address.removeprefix("https://").split(":")
    context = client_context(files)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    with contextlib.suppress(ConnectionError):  # what ends it is not asked here
        await reader.read()
    return int(certificate["serialNumber"], 16)


async def test_callers_must_show_a_certificate(authority: Authority, tmp_path: Path) -> None:
    client = authority.issue("client")
    stranger = Authority(tmp_path / "other").issue("client")
    async with running(Sample().make_app(), **serving(authority.issue("service"))) as service:
        settings = ServiceSettings(tls_ca=client.ca, tls_client_cert=client.cert, tls_client_key=client.key)
        async with make_peer_client(settings) as peer:
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
        for cert, key in ((None, None), (stranger.cert, stranger.key)):
            refused = ServiceSettings(tls_ca=client.ca, tls_client_cert=cert, tls_client_key=key)
            for http in (make_peer_client(refused), make_control_client(TlsFiles(client.ca, cert, key), None)):
                async with http:
                    with pytest.raises(httpx.TransportError):  # what both of them try again for, and say
                        await http.get(f"{service.address}/healthz")


async def test_a_new_certificate_interrupts_nothing(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    client = authority.issue("client")
    files = authority.issue("service")
    assert files.cert
    sample = Sample()
    async with (
        running(sample.make_app(), **serving(files)) as service,
        httpx.AsyncClient(verify=client_context(client)) as http,
        asyncio.timeout(30),
    ):
        assert await serial_of(service.address, client) == serial(files.cert)
        slow = asyncio.create_task(http.get(f"{service.address}/slow"))
        await sample.slow_begun.wait()
        authority.issue("service", only_cert=True)  # its key is not there yet
        first = await serial_of(service.address, client)
        authority.issue("service")
        assert first != serial(files.cert)
        assert await serial_of(service.address, client) == serial(files.cert)
        assert (await http.get(f"{service.address}/healthz")).status_code == 200
        sample.slow_ends.set()
        assert (await slow).json() == "slow"  # it began with the old one


@pytest.mark.parametrize(
    "limits",
    [{"header_timeout_seconds": 1}, {"max_connections": 3}],
    ids=["for longer than it may take", "while there are too many"],
)
async def test_a_handshake_that_does_not_end_is_cut_off(limits: dict[str, float], authority: Authority) -> None:
    files = authority.issue("service")
    async with running(Sample().make_app(), **limits, **serving(files)) as service, asyncio.timeout(10):
        host, port = service.address.removeprefix("https://").split(":")
        settings = ServiceSettings(tls_ca=files.ca, tls_client_cert=files.cert, tls_client_key=files.key)
        async with make_peer_client(settings) as peer, make_peer_client(settings) as other:
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
            begun = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
            for _, writer in begun:
                writer.write(bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(80))  # of 512 that it announces
            # With too many connections the oldest handshakes go first, and the one of `other` is completed.
            assert (await other.get(f"{service.address}/healthz")).status_code == 200
            for reader, writer in begun[: None if "header_timeout_seconds" in limits else 4]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            # A connection with a request stays.
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
            for _, writer in begun:
                writer.close()


async def test_a_connection_that_speaks_plain_http_is_closed_soon(authority: Authority) -> None:
    async with running(Sample().make_app(), **serving(authority.issue("service"))) as service, asyncio.timeout(10):
        host, port = service.address.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await reader.read() == b""  # OpenSSL sends no alert for plain HTTP
        writer.close()


# ---------------------------------------------------------------------- the probe of a kubelet


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


async def test_a_probe_shows_the_certificate_of_the_environment(authority: Authority) -> None:
    files = authority.issue("service")
    names = {"CA": files.ca, "CLIENT_CERT": files.cert, "CLIENT_KEY": files.key}
    environ = {f"GRADPOST_TLS_{name}": str(path) for name, path in names.items()}
    sample = Sample()
    async with running(sample.make_app(), **serving(files)) as service:
        url = f"https://localhost:{service.address.rpartition(':')[2]}/readyz"
        assert await probe(url, environ) == (0, "")
        code, said = await probe(url, {"GRADPOST_TLS_CA": environ["GRADPOST_TLS_CA"]})
        assert code == 1, said  # no certificate
        sample.missing = "reader"
        assert await probe(url, environ) == (1, f"{url}: HTTP Error 503: Service Unavailable\n")
    code, said = await probe(url, environ)
    assert (code, "refused" in said) == (1, True)
