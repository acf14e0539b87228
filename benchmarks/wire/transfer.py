"""A plain transfer over TCP: what a link carries at most, without us."""

from __future__ import annotations

import socket
import threading
import time

from .machines import Machine

SECONDS = 2.0  # that it takes, about
PART_BYTES = 1 << 18
PATIENCE_SECONDS = 30.0


def measure_bits_per_second(sender: Machine, receiver: Machine, bits_per_second: int) -> float:
    """Payload that arrives, over a link of this nominal rate. Raises TimeoutError."""
    with receiver.call(socket.create_server, (receiver.address, 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        with sender.call(socket.create_connection, listener.getsockname(), PATIENCE_SECONDS) as outgoing:
            incoming, _ = listener.accept()
            with incoming:
                incoming.settimeout(PATIENCE_SECONDS)
                return _transfer(outgoing, incoming, int(bits_per_second / 8 * SECONDS))


def _transfer(outgoing: socket.socket, incoming: socket.socket, num_bytes: int) -> float:
    def send() -> None:
        part, left = bytes(PART_BYTES), num_bytes
        while left > 0:
            outgoing.sendall(part[:left])
            left -= PART_BYTES
        outgoing.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send, daemon=True)
    buffer, received, begin = bytearray(PART_BYTES), 0, time.perf_counter()
    thread.start()
    while count := incoming.recv_into(buffer):
        received += count
    return 8 * received / (time.perf_counter() - begin)
