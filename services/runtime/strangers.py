"""Connections that have not become anything to the HTTP server: in the middle of a TLS handshake, or silent.

Neither server counts them, or knows how long they have been there; the kernel shows them all (`connections.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .connections import Connections, Peer

SWEEPS = 4  # in the time after which something is cut off


class Strangers:
    """Cuts off who has asked for nothing in `seconds`; and the oldest of them at once, when there are too many."""

    def __init__(
        self, connections: Connections, is_known: Callable[[Peer], bool], *, seconds: float, max_connections: int
    ) -> None:
        self._connections = connections
        self._is_known = is_known
        self._seconds = seconds
        self._max_connections = max_connections
        self._seen_at: dict[Peer, float] = {}  # those that are not known, and when they were seen first

    def sweep(self, open_now: Collection[Peer], now: float) -> None:
        """Look at all connections that are open, once."""
        self._seen_at = {peer: self._seen_at.get(peer, now) for peer in open_now if not self._is_known(peer)}
        too_many = len(open_now) - self._max_connections
        for number, (peer, since) in enumerate(sorted(self._seen_at.items(), key=lambda item: item[1])):
            if number < too_many or now - since >= self._seconds:
                self._connections.cut(peer)
