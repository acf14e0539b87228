"""Unix sockets between processes of one host, under names that nobody can guess.

A name in Linux's abstract namespace goes with its socket, leaves no file behind, and is known within one network
namespace alone: on another host, or in another container, a connection is refused at once.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from contextlib import ExitStack, suppress

SEND_BUFFER_BYTES = 4 * 1024 * 1024  # to which TCP's grows by itself; the kernel gives net.core.wmem_max at most

_CREDENTIALS = struct.Struct("iII")  # process, user and group: struct ucred of sys/socket.h


def bind_locally() -> socket.socket | None:
    """A socket with a new name that does not listen yet; None where there can be none."""
    if sys.platform != "linux":
        return None
    with ExitStack() as stack, suppress(OSError):  # in a sandbox there may be no Unix sockets, or no names for them
        bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        bound.bind(f"\0gradpost-{secrets.token_hex(16)}")
        stack.pop_all()
        return bound
    return None


def local_name(bound: socket.socket) -> str:
    """What others connect to: `gradpost-0f1e2d3c4b5a69788796a5b4c3d2e1f0`, say."""
    name: bytes = bound.getsockname()
    return name[1:].decode("ascii")


def connect_locally(name: str) -> socket.socket:
    """Connect without blocking. Raises OSError if that cannot be done at once, or not to a process of this user.

    Whoever has an account on a pserver's host can read the name there (in /proc/net/unix), and might listen under it
    on this one, for a trainer's token.
    """
    if sys.platform != "linux":
        raise OSError("abstract Unix sockets are Linux's")
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
    """Let the kernel take more at once: by default it is some 200 kB, after which one end waits for the other."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
