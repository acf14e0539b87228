"""The floor: the same bytes over plain TCP sockets, and nothing else.

A trainer sends each server its part of the gradient; a server receives into a staging array for each trainer, adds
in place, steps SGD once, and sends its values back. No names, no checks, no failures. There is a thread for each
connection, but only one for small parts.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time

import numpy as np
import torch

from benchmarks.comparison.paced import take_rounds
from benchmarks.comparison.work import LEARNING_RATE, Address, Work, read_arguments

SMALL_BYTES = 64 * 1024  # a socket takes so much at once, and one thread is faster than several


def receive_into(connection: socket.socket, array: np.ndarray) -> bool:
    """Fill the array, and return False if the connection ends before."""
    view = memoryview(array).cast("B")
    at = 0
    while at < len(view):
        if not (num_bytes := connection.recv_into(view[at:])):
            return False
        at += num_bytes
    return True


def serve(work: Work, index: int, at: list[Address]) -> None:
    num_elements = part_of(work, index).stop - part_of(work, index).start
    values = np.zeros(num_elements, dtype=np.float32)
    staged = [np.empty_like(values) for _ in range(work.num_trainers)]
    arrived, applied = threading.Barrier(work.num_trainers), threading.Barrier(work.num_trainers)

    def step() -> None:
        for other in staged[1:]:
            np.add(staged[0], other, out=staged[0])
        np.multiply(staged[0], LEARNING_RATE / work.num_trainers, out=staged[0])
        np.subtract(values, staged[0], out=values)

    def serve_one(connection: socket.socket, number: int) -> None:
        with connection:
            while receive_into(connection, staged[number]):
                if arrived.wait() == 0:
                    step()
                applied.wait()
                connection.sendall(values)

    def serve_all(connections: list[socket.socket]) -> None:
        while all(list(map(receive_into, connections, staged))):
            step()
            for connection in connections:
                connection.sendall(values)

    with socket.create_server(at[index]) as listener:
        connections = [listener.accept()[0] for _ in range(work.num_trainers)]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if values.nbytes <= SMALL_BYTES:
            serve_all(connections)
            return
        threads = [threading.Thread(target=serve_one, args=(one, at)) for at, one in enumerate(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def part_of(work: Work, index: int) -> slice:
    """Return the range of a server's elements in the concatenation of all tensors."""
    total = sum(work.elements)
    return slice(total * index // work.num_servers, total * (index + 1) // work.num_servers)


def connect(address: Address) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)  # the server's imports take a moment
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def train(work: Work, rank: int, at: list[Address]) -> None:
    gradient = np.concatenate([tensor.numpy() for tensor in work.make_gradients(rank)])
    values = np.zeros_like(gradient)
    connections = [connect(address) for address in at]
    begin, end = threading.Barrier(work.num_servers + 1), threading.Barrier(work.num_servers + 1)

    def exchange(index: int) -> None:
        part = part_of(work, index)
        while True:
            begin.wait()
            connections[index].sendall(gradient[part])
            receive_into(connections[index], values[part])
            end.wait()

    def one_round() -> None:
        begin.wait()
        end.wait()

    def one_small_round() -> None:
        parts = [part_of(work, index) for index in range(work.num_servers)]
        for connection, part in zip(connections, parts, strict=True):
            connection.sendall(gradient[part])
        for connection, part in zip(connections, parts, strict=True):
            receive_into(connection, values[part])

    is_small = values.nbytes // work.num_servers <= SMALL_BYTES
    for index in range(0 if is_small else work.num_servers):
        threading.Thread(target=exchange, args=(index,), daemon=True).start()
    take_rounds(work, rank, one_small_round if is_small else one_round, lambda: [torch.from_numpy(values)])


def main() -> None:
    options: argparse.Namespace = read_arguments(__doc__)
    {"server": serve, "trainer": train}[options.role](options.work, options.index, options.at)


if __name__ == "__main__":
    main()
