"""Connections in the middle of a handshake: cut off in time, and the oldest at once when there are too many."""

from __future__ import annotations

from services.runtime.connections import Connections, Peer
from services.runtime.strangers import Strangers


class Kernel(Connections):
    def __init__(self) -> None:
        self.was_cut: list[int] = []

    def cut(self, peer: Peer) -> None:
        self.was_cut.append(peer[1])


def peers(*ports: int) -> set[Peer]:
    return {("10.0.0.1", port) for port in ports}


def test_who_asks_for_nothing_is_cut_off_in_time() -> None:
    kernel, known = Kernel(), peers(1)
    strangers = Strangers(kernel, known.__contains__, seconds=10, max_connections=5)
    strangers.sweep(peers(1, 2), 0)
    strangers.sweep(peers(1, 2, 3), 5)
    assert kernel.was_cut == []
    known.update(peers(3))  # it has asked for something
    strangers.sweep(peers(1, 2, 3), 10)
    assert kernel.was_cut == [2]


def test_of_too_many_the_oldest_strangers_go_at_once() -> None:
    kernel, known = Kernel(), peers(1)
    strangers = Strangers(kernel, known.__contains__, seconds=10, max_connections=3)
    strangers.sweep(peers(1, 2), 0)
    strangers.sweep(peers(1, 2, 3, 4, 5), 1)
    assert len(kernel.was_cut) == 2
    assert kernel.was_cut[0] == 2
    assert 1 not in kernel.was_cut
