"""TLS contexts that follow their files, and tokens."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ps_config import tokens
from ps_config.certificates import (
    CertificateError,
    TlsFiles,
    client_context,
    server_context,
)
from ps_config.environment import SettingsError
from ps_config.hosts import check_listening, is_ip_literal
from ps_config.tokens import PREVIOUS, SCOPES, Scope, TokenFile, TokenFolder, TokenPair


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


# ---------------------------------------------------------------------- tokens


OLD, NEW = "old-" + "x" * 20, "new-" + "x" * 20


def put(file: Path, token: str, mode: int = 0o400) -> None:
    """Write a token file as `gradpost token` does, by renaming."""
    temporary = file.with_name(".temporary")
    temporary.write_text(f"{token}\n")
    temporary.chmod(mode)
    temporary.rename(file)


@pytest.mark.parametrize("text", ["", "8 bytes!", "two\nlines" + "x" * 20, "a b" + "x" * 20, "ä" * 30, "x" * 1001])
def test_an_invalid_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "read").write_text(text)
    (tmp_path / "read").chmod(0o400)
    with pytest.raises(SettingsError, match="read holds no token: one line of 20 to 1000 letters") as caught:
        TokenPair(tmp_path / "read").read()
    assert not text or text not in str(caught.value)


def test_a_file_is_read_again_when_it_changes_and_keeps_its_last_valid_token(tmp_path: Path) -> None:
    problems: list[str] = []
    file = TokenFile(tmp_path / "read", problems.append)
    assert file.read() is None
    for text, token in ((OLD, OLD), (NEW, NEW), ("not a token", NEW), ("not a token", NEW)):
        put(file.path, text)
        assert file.read() == token
    [problem] = problems
    assert "holds no token" in problem
    file.path.unlink()
    assert file.read() is None


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX modes")
@pytest.mark.parametrize(("mode", "is_reported"), [(0o440, False), (0o460, True), (0o444, True)])
def test_a_secret_of_kubernetes_is_read_through_the_group_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_reported: bool
) -> None:
    """Kubernetes changes `defaultMode: 0400` to 0440 for a pod with an fsGroup; the files belong to root."""
    messages: list[str] = []
    put(tmp_path / "read", OLD, mode)
    owner, group = (tmp_path / "read").stat().st_uid, (tmp_path / "read").stat().st_gid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [group])
    assert TokenFile(tmp_path / "read", messages.append).read() == OLD
    assert bool(messages) == is_reported
    monkeypatch.setattr(os, "getgroups", list)
    TokenFile(tmp_path / "read", messages.append).read()
    assert messages


def test_a_pair_is_the_newest_and_the_one_before(tmp_path: Path) -> None:
    pair = TokenPair(tmp_path / "train")
    with pytest.raises(SettingsError, match=r"there is no token file .*train; `gradpost token create` writes one"):
        pair.read()
    put(tmp_path / "train", OLD)
    assert pair.read() == [OLD]
    put(tmp_path / f"train{PREVIOUS}", OLD)
    put(tmp_path / "train", NEW)
    assert pair.read() == [NEW, OLD]
    (tmp_path / "train").unlink()
    assert pair.read() == [NEW, OLD]  # a caller keeps the tokens that it has read


def test_the_scope_of_a_token(tmp_path: Path) -> None:
    folder = TokenFolder(tmp_path)
    assert folder.scope_of(OLD) is None
    for scope in SCOPES:
        put(tmp_path / scope, f"{scope}-{OLD}")
    assert [folder.scope_of(f"{scope}-{OLD}") for scope in SCOPES] == list(SCOPES)
    assert folder.scope_of("") is None
    assert folder.scope_of("ä") is None
    assert folder.scope_of(f"read-{OLD}"[:-1]) is None


def test_two_tokens_are_valid_while_one_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 0.0)
    folder = TokenFolder(tmp_path)
    put(tmp_path / "read", OLD)
    assert folder.scope_of(OLD) == "read"
    put(tmp_path / f"read{PREVIOUS}", OLD)
    put(tmp_path / "read", NEW)
    assert (folder.scope_of(NEW), folder.scope_of(OLD)) == ("read", "read")
    put(tmp_path / f"read{PREVIOUS}", NEW)
    assert (folder.scope_of(NEW), folder.scope_of(OLD)) == ("read", None)
    (tmp_path / "read").unlink()
    (tmp_path / f"read{PREVIOUS}").unlink()
    assert folder.scope_of(NEW) is None


def test_a_new_token_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 1e9)
    folder = TokenFolder(tmp_path)
    put(tmp_path / "read", OLD)
    assert folder.scope_of(OLD) == "read"
    put(tmp_path / "read", NEW)
    assert folder.scope_of(NEW) == "read"


def test_the_widest_scope_counts(tmp_path: Path) -> None:
    scopes: list[Scope] = ["read", "admin"]
    for scope in scopes:
        put(tmp_path / scope, OLD)
    assert TokenFolder(tmp_path).scope_of(OLD) == "admin"


# ---------------------------------------------------------------- hosts


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "some-name", "localhost.example.com"])
def test_listening_beyond_loopback_needs_tokens_or_the_insecure_setting(host: str) -> None:
    for loopback in ("127.9.9.9", "::1", "LOCALHOST"):
        check_listening(loopback, has_tokens=False, insecure=False)
    check_listening(host, has_tokens=True, insecure=False)
    check_listening(host, has_tokens=False, insecure=True)
    with pytest.raises(ValueError, match=r"gradpost token create --dir DIR.* GRADPOST_INSECURE=true"):
        check_listening(host, has_tokens=False, insecure=False)


@pytest.mark.parametrize("host", ["1", "127.1", "0x7f.1", "127.0.0.1.example.com", ""])
def test_names_that_a_resolver_accepts_are_no_addresses(host: str) -> None:
    assert not is_ip_literal(host)
