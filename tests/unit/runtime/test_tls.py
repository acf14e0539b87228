"""TLS of a service, on both servers: whom it lets in, and certificates that are replaced while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import httpx
import pytest

from ps_protocol.certificates import TlsFiles, client_context
from services.runtime.peers import make_peer_client
from services.runtime.settings import ServiceSettings
from trainer_client.transport.connections import make_control_client

from ..protocol.test_certificates import Authority, serial
from .support import SERVERS, Sample, running

every_server = pytest.mark.parametrize("server", SERVERS)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


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


@every_server
@pytest.mark.asyncio
async def test_callers_must_show_a_certificate(server: str, authority: Authority, tmp_path: Path) -> None:
    client = authority.issue("client")
    stranger = Authority(tmp_path / "other").issue("client")
    async with running(Sample().make_app(), server=server, **serving(authority.issue("service"))) as service:
        settings = ServiceSettings(tls_ca=client.ca, tls_client_cert=client.cert, tls_client_key=client.key)
        async with make_peer_client(settings) as peer:
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
        for cert, key in ((None, None), (stranger.cert, stranger.key)):
            refused = ServiceSettings(tls_ca=client.ca, tls_client_cert=cert, tls_client_key=key)
            for http in (make_peer_client(refused), make_control_client(TlsFiles(client.ca, cert, key), None)):
                async with http:
                    with pytest.raises(httpx.TransportError):  # what both of them try again for, and say
                        await http.get(f"{service.address}/healthz")


@every_server
@pytest.mark.asyncio
async def test_a_new_certificate_interrupts_nothing(
    server: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    client = authority.issue("client")
    files = authority.issue("service")
    assert files.cert
    sample = Sample()
    async with (
        running(sample.make_app(), server=server, **serving(files)) as service,
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
        # Both accept connections for a moment; then only the new one does. What waits in the queue of the old listener
        # when that is closed is reset by the kernel, and connects again.
        serials, num_resets = set[int](), 0
        while serials != {serial(files.cert)}:
            try:
                serials = {await serial_of(service.address, client) for _ in range(5)}
                assert (await http.get(f"{service.address}/healthz")).status_code == 200
            except (ConnectionResetError, httpx.ConnectError):
                num_resets += 1
        assert num_resets <= 1
        sample.slow_ends.set()
        assert (await slow).json() == "slow"  # it began with the old one


@every_server
@pytest.mark.asyncio
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who is connected")
async def test_who_stops_in_the_middle_of_a_handshake_is_cut_off(server: str, authority: Authority) -> None:
    """No HTTP server counts such connections, or gives them less than a minute."""
    files = authority.issue("service")
    app = Sample().make_app()
    async with running(app, server=server, header_timeout_seconds=0.6, **serving(files)) as service:
        host, port = service.address.removeprefix("https://").split(":")
        settings = ServiceSettings(tls_ca=files.ca, tls_client_cert=files.cert, tls_client_key=files.key)
        async with make_peer_client(settings) as peer:
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
            begun = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
            for _, writer in begun:
                writer.write(bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(80))  # of 512 that it says there are
            async with asyncio.timeout(5):
                for reader, writer in begun:
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                    writer.close()
            # A connection on which something was asked stays.
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
