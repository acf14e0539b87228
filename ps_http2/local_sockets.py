"""Unix sockets between processes of one host, under random names that cannot be guessed.

A name in Linux's abstract namespace disappears with its socket, has no file, and is visible in one network namespace
only. On another host, or in another container, a connection is refused at once.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from contextlib import ExitStack, suppress

SEND_BUFFER_BYTES = 4 * 1024 * 1024  # as large as TCP's grows; the kernel allows net.core.wmem_max at most

_CREDENTIALS = struct.Struct("iII")  # process, user and group: struct ucred of sys/socket.h


def bind_locally() -> socket.socket | None:
    """Return a socket bound to a new name, not listening yet; None where abstract Unix sockets are unavailable."""
    if sys.platform != "linux":
        return None
    with ExitStack() as stack, suppress(OSError):  # a sandbox may forbid Unix sockets, or their names
        bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        bound.bind(f"\0gradpost-{secrets.token_hex(16)}")
        stack.pop_all()
        return bound
    return None


def local_name(bound: socket.socket) -> str:
    """Return the name for `connect_locally`, such as `gradpost-0f1e2d3c4b5a69788796a5b4c3d2e1f0`."""
    name: bytes = bound.getsockname()
    return name[1:].decode("ascii")


def connect_locally(name: str) -> socket.socket:
    """Connect without blocking. Raises OSError if that fails, or if the listener runs as another user.

    The names are readable in /proc/net/unix. A user with an account on a pserver's host could listen under such a name
    on a trainer's host, and would receive the trainer's token.
    """
    if sys.platform != "linux":
        raise OSError("abstract Unix sockets exist on Linux only")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{name}")
        _, user, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            raise PermissionError(f"a process of another user ({user}) listens there")
        enlarge_buffer(connection)
    except OSError:
        connection.close()
        raise
    return connection


def enlarge_buffer(connection: socket.socket) -> None:
    """Enlarge the send buffer. The default of about 200 kB makes one end wait for the other."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
