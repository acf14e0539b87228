"""TLS contexts that follow their files."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ps_config.certificates import (
    CertificateError,
    TlsFiles,
    client_context,
    server_context,
)


@dataclass
class Authority:
    """A certificate authority, and a folder with what it issues."""

    folder: Path
    authority: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.authority.cert_pem.write_to_path(str(self.ca))

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, *, only_cert: bool = False) -> TlsFiles:
        """Write a new certificate of 127.0.0.1 and its key under this name, each by renaming."""
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        files = TlsFiles(self.ca, self.folder / f"{name}.pem", self.folder / f"{name}.key")
        for path, pem in ((files.cert, issued.cert_chain_pems[0]), (files.key, issued.private_key_pem)):
            assert path is not None
            if path == files.key and only_cert:
                break
            temporary = path.with_suffix(".temporary")
            pem.write_to_path(str(temporary))
            temporary.rename(path)
        return files


def serial(cert: Path) -> int:
    return x509.load_pem_x509_certificate(cert.read_bytes()).serial_number


def serial_of_peer(tls: ssl.SSLSocket | ssl.SSLObject) -> int:
    certificate = tls.getpeercert()
    assert certificate
    return int(str(certificate["serialNumber"]), 16)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> int:
    """Connect in memory, and return the serial number of the client's certificate as the server received it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepted = server.wrap_bio(to_server, to_client, server_side=True)
    connected = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    for _ in range(4):
        for end in (accepted, connected):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return serial_of_peer(accepted)


@pytest.fixture
def server(authority: Authority) -> ssl.SSLContext:
    return server_context(authority.issue("service"))


@pytest.mark.asyncio
async def test_a_client_without_a_certificate_receives_the_reason(authority: Authority) -> None:
    loop = asyncio.get_running_loop()
    context = server_context(authority.issue("service"))
    async with await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        without = client_context(TlsFiles(authority.ca))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=without)
        writer.write(b"x" * 100_000)  # right behind the handshake, as a request is
        with pytest.raises(ssl.SSLError, match="certificate required"):
            await reader.read()
        writer.close()


@pytest.mark.asyncio
async def test_a_client_that_sends_after_the_alert_is_disconnected(authority: Authority) -> None:
    loop = asyncio.get_running_loop()
    context = server_context(authority.issue("service"))
    async with await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(b"\x16\x03\x01\x00\x05hello")  # a record of a handshake, but no hello
        assert await reader.read(1) == b"\x15"  # an alert
        writer.write(b"x")
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()


def test_an_authority_can_be_replaced(authority: Authority, server: ssl.SSLContext) -> None:
    context = client_context(authority.issue("client"))
    shake_hands(server, context)
    authority.authority = trustme.CA()
    authority.__post_init__()
    authority.issue("service")
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shake_hands(server, context)
    authority.issue("client")
    assert shake_hands(server, context) == serial(authority.folder / "client.pem")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ca": "nothing.pem"}, r"nothing\.pem cannot be read: No such file or directory"),
        ({"ca": "service.key"}, r"service\.key must hold the certificate of an authority in PEM form"),
        (
            {"cert": "service.key"},
            r"service\.key and .*service\.key must hold a TLS certificate and a private key in PEM form",
        ),
        ({"key": "other.key"}, r"the TLS key .*other\.key does not belong to the certificate .*service\.pem"),
        ({"key": "encrypted.key"}, r"the TLS key .*encrypted\.key is encrypted: write it without a passphrase"),
        ({"key": None}, r"go together: give both or neither, not .*service\.pem"),
        ({"cert": None}, r"go together: give both or neither, not .*service\.key"),
    ],
)
@pytest.mark.parametrize("make_context", [client_context, server_context])
def test_unusable_files_are_named(
    make_context: Callable[[TlsFiles], ssl.SSLContext], wrong: dict[str, str | None], message: str, authority: Authority
) -> None:
    files = authority.issue("service")
    authority.issue("other")
    assert files.key is not None
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"passphrase")
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (authority.folder / "encrypted.key").write_bytes(key.private_bytes(*formats, encryption))
    with pytest.raises(CertificateError, match=message):
        make_context(replace(files, **{name: file and authority.folder / file for name, file in wrong.items()}))
