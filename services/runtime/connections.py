"""The connections of this process as the kernel knows them, whoever accepted them; on Linux, elsewhere none.

An HTTP server that is not written in Python keeps its sockets to itself. The kernel still tells how many bytes the
other end has taken, and can cut a connection off.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple, TypeAlias

Peer: TypeAlias = tuple[str, int]  # address and port of the other end

_FILES = "/proc/self/fd"
_BYTES_ACKED_AT = 120  # in struct tcp_info of linux/tcp.h; the bytes received stand behind
_TCP_INFO_BYTES = 136


class Traffic(NamedTuple):
    """Bytes since the connection was opened."""

    taken: int  # sent and acknowledged by the other end's kernel
    received: int


class Connections:
    """Those of one local port. A file descriptor may be closed, and mean another connection, at any time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._files: dict[Peer, int] = {}

    def scan(self) -> dict[Peer, Traffic]:
        """All that are open; some ten microseconds for each."""
        self._files.clear()
        found = {}
        with suppress(FileNotFoundError):
            for name in os.listdir(_FILES):
                connection = self._open(int(name))
                if connection is not None:
                    with connection:
                        peer = _peer(connection)
                        if (traffic := _read(connection)) is not None:
                            self._files[peer], found[peer] = int(name), traffic
        return found

    def cut(self, peer: Peer) -> None:
        """End it in both directions, now; whoever holds it notices."""
        connection = self._find(peer)
        if connection is not None:
            with connection, suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _find(self, peer: Peer) -> socket.socket | None:
        for _ in range(2):
            connection = self._open(self._files.get(peer, -1))
            if connection is not None and _peer(connection) == peer:
                return connection
            if connection is not None:
                connection.close()
            self.scan()  # for the second try
        return None

    def _open(self, number: int) -> socket.socket | None:
        """A duplicate of a descriptor if it is a connection of ours. To be closed at once: it keeps that open."""
        try:
            duplicate = os.dup(number)
        except OSError:
            return None
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:  # a file
            os.close(duplicate)
            return None
        with suppress(OSError):  # it listens, or is over
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self._port:
                connection.getpeername()
                return connection
        connection.close()
        return None


def _peer(connection: socket.socket) -> Peer:
    try:
        host, port, *_ = connection.getpeername()
    except OSError:  # it has just ended
        return "", 0
    return host, port


def _read(connection: socket.socket) -> Traffic | None:
    with suppress(OSError, AttributeError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) == _TCP_INFO_BYTES:
            return Traffic(*struct.unpack_from("QQ", info, _BYTES_ACKED_AT))
    return None
