"""The address of a service: taking it, waiting until it answers, and how others are told of it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress
from typing import Any

from ps_config.hosts import authority, reachable_host

from .settings import ServiceSettings


class ListenError(OSError):
    """The host and port cannot be taken; the message says why and what to do."""


def take_port(host: str, port: int) -> socket.socket:
    """Bind `host` and `port` (0: a free one) for this process alone, without listening yet. Raises ListenError."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _bind(family, address)
    except OSError as error:  # gaierror included
        if error.errno == errno.EADDRINUSE:
            reason = (
                "another process listens there; stop it or choose another port (--port or GRADPOST_PORT, 0 for any)"
            )
        else:
            reason = f"{error.strerror}; choose another address (--host or GRADPOST_HOST, --port or GRADPOST_PORT)"
        raise ListenError(f"cannot listen on {authority(host, port)}: {reason}") from error


def _bind(family: int, address: Any) -> socket.socket:
    # asyncio turns Nagle's algorithm off only where the protocol is named, and with it a request may take 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # It passes over connections in TIME_WAIT of an earlier process, not over a socket that listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


async def wait_until_listening(bound: socket.socket) -> None:
    """Wait until connections to the address of `bound` are accepted."""
    while True:
        with socket.socket(bound.family, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            with suppress(ConnectionRefusedError):
                await asyncio.get_running_loop().sock_connect(probe, bound.getsockname())
                return
        await asyncio.sleep(0.005)


def advertised_address(settings: ServiceSettings, port: int) -> str:
    """The base URL under which others reach a service that listens on `port`, without a slash at its end.

    What the settings say, else the host that it listens on; if that is every interface, the address from which this
    machine reaches other networks, and its name if it reaches none. With TLS the certificate must be valid for it.
    """
    if settings.advertise_address is not None:
        return settings.advertise_address
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{authority(reachable_host(settings.host), port)}"


def announce(settings: ServiceSettings, address: str) -> None:
    """Tell the process that started this one, over `ready_fd`, that it serves and where; then close that."""
    if settings.ready_fd is not None:
        os.write(settings.ready_fd, f"{address}\n".encode())
        os.close(settings.ready_fd)
