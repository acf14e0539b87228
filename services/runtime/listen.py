"""The address of a service: binding it, waiting until it accepts connections, and announcing it."""

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
    """The host and port cannot be bound; the message has the reason and a remedy."""


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
    # asyncio disables Nagle's algorithm, which can delay a request by 40 ms, only if the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Ignores connections in TIME_WAIT of an earlier process, but no listening socket.
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
    """Return the base URL under which others reach a service that listens on `port`, without a trailing slash.

    It is `advertise_address`, else made from `host`. If that is every interface, it is the address from which this
    machine reaches other networks, or its name if it reaches none. With TLS the certificate must be valid for it.
    """
    if settings.advertise_address is not None:
        return settings.advertise_address
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{authority(reachable_host(settings.host), port)}"


def announce(settings: ServiceSettings, address: str) -> None:
    """Write the address to `ready_fd`, for the process that started this one, and close it."""
    if settings.ready_fd is not None:
        os.write(settings.ready_fd, f"{address}\n".encode())
        os.close(settings.ready_fd)
