"""TLS contexts that follow their files: replacing a file renews a certificate without a restart."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .environment import SettingsError, find_path, stamp_file

Build = Callable[[], ssl.SSLContext]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side of a connection: the authority that it trusts, its certificate and the private key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.ca, self.cert, self.key) if path is not None]


def client_files(environ: Mapping[str, str] = os.environ) -> TlsFiles:
    """Return the TLS files of a client, as the environment or the settings file name them."""
    return TlsFiles(*(find_path(name, environ) for name in ("tls_ca", "tls_client_cert", "tls_client_key")))


class CertificateError(SettingsError, OSError):
    """A TLS file cannot be used; the message names the file and the reason."""


class WatchedFiles:
    """Detects that a file was replaced or written."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._stamp: list[tuple[int, ...]] | None = self._stamps()

    def have_changed(self) -> bool:
        """Return whether a file has changed since the last call. Removing a file is a change."""
        seen, self._stamp = self._stamp, self._stamps()
        return seen != self._stamp

    def forget(self) -> None:
        """Report a change at the next call, because the files could not be used."""
        self._stamp = None

    def _stamps(self) -> list[tuple[int, ...]]:
        return [stamp_file(path) for path in self._paths]


ALERT_SECONDS = 1.0  # for the other end of a failed handshake to read the alert, if there is one
# Closes the connection whose handshake runs in this context, if the server has set it.
close_handshake: ContextVar[Callable[[], object] | None] = ContextVar("close_handshake", default=None)


class _AlertingObject(ssl.SSLObject):
    """An object that sends the alert of a failed handshake, before which asyncio would close the connection.

    The first call does not raise the error. The connection ends when the other end closes it or sends more, or a
    second later through `close_handshake`.
    """

    _refused: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Perform the handshake, and let its alert be sent before its error is raised."""
        if self._refused is not None:
            raise self._refused
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self._refused = error
            if (close := close_handshake.get()) is not None:
                asyncio.get_running_loop().call_later(ALERT_SECONDS, close)
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, str(error)) from error


class FreshContext(ssl.SSLContext):
    """A context that uses the current files for each new connection.

    It builds an inner context when a file has changed. While the files do not fit each other, because the certificate
    is replaced and its key not yet, it continues with the inner context before.
    """

    def __new__(cls, files: TlsFiles, build: Build) -> FreshContext:
        """Create the context. The first inner context is built by the constructor, with the errors of `build`."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)  # the inner context's protocol counts

    def __init__(self, files: TlsFiles, build: Build) -> None:
        self._build = build
        self._alpn: list[str] | None = None
        self._files = WatchedFiles(files.paths)
        self._context = build()

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        """Set the protocols of this context, also for inner contexts that are built later."""
        self._alpn = list(alpn_protocols)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """Wrap a socket with the current inner context."""
        return self._current().wrap_socket(*args, **kwargs)

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Wrap two buffers with the current inner context."""
        return self._current().wrap_bio(*args, **kwargs)

    def _current(self) -> ssl.SSLContext:
        if self._files.have_changed():
            try:
                self._context = self._build()
            except OSError:  # ssl.SSLError included
                self._files.forget()  # tried again with the next connection
        if self._alpn is not None:
            self._context.set_alpn_protocols(self._alpn)
        return self._context


def client_context(files: TlsFiles, *, with_system: bool = False) -> ssl.SSLContext:
    """Return a context that trusts `files.ca` and presents `files.cert` if there is one. Raises CertificateError.

    It trusts the system's authorities if there is no `files.ca`, or with `with_system`.
    """

    def build() -> ssl.SSLContext:
        _check_readable(files)
        with _naming(files.ca):
            context = ssl.create_default_context(cafile=None if with_system or files.ca is None else str(files.ca))
            if files.ca is not None and with_system:
                context.load_verify_locations(cafile=str(files.ca))
        if files.cert is not None or files.key is not None:
            _load_chain(context, files)
        return context

    return FreshContext(files, build) if files.paths else build()


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that presents `files.cert`. Raises CertificateError.

    With `files.ca` it refuses clients without a certificate of this authority.
    """

    def build() -> ssl.SSLContext:
        _check_readable(files)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _AlertingObject
        _load_chain(context, files)
        if files.ca is not None:
            with _naming(files.ca):
                context.load_verify_locations(cafile=str(files.ca))
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return FreshContext(files, build)


def hint_at_tls(address: str, error: Exception) -> str:
    """Return a hint for a message about `error` if the service at `address` may serve TLS; else an empty string.

    A port that serves TLS accepts the connection and closes it without an answer to plain HTTP.
    """
    # These are errors of httpx, which is not imported here.
    is_unanswered = type(error).__name__ in ("ReadTimeout", "ReadError", "RemoteProtocolError")
    may_be_tls = address.startswith("http:") and is_unanswered
    return "; if it serves TLS, its address begins with https:" if may_be_tls else ""


def _check_readable(files: TlsFiles) -> None:
    for path in files.paths:
        try:
            path.open("rb").close()
        except OSError as error:
            raise CertificateError(f"the TLS file {path} cannot be read: {error.strerror}") from None


@contextmanager
def _naming(ca: Path | None) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError:
        raise CertificateError(f"the TLS file {ca} must hold the certificate of an authority in PEM form") from None


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    cert, key = files.cert, files.key
    if cert is None or key is None:
        raise CertificateError(f"a TLS certificate and its key go together: give both or neither, not {cert or key}")

    def refuse() -> NoReturn:  # OpenSSL would ask on the terminal
        raise CertificateError(f"the TLS key {key} is encrypted: write it without a passphrase")

    try:
        context.load_cert_chain(cert, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(f"the TLS key {key} does not belong to the certificate {cert}") from None
        raise CertificateError(f"{cert} and {key} must hold a TLS certificate and a private key in PEM form") from None
