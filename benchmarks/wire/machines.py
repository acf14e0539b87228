"""Machines on one switch: network namespaces on a bridge, each with a link of a given rate in both directions.

    the switch: a bridge  ═══ tbf ═ veth ═ tbf ═══ 10.213.80.10, a machine
                          ═══ tbf ═ veth ═ tbf ═══ 10.213.80.11, another …

A token bucket (tc-tbf) limits each sender, a machine or the switch, to the rate. The switch has its own namespace, so
that the real machine's network is not changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..namespaces import Namespace, run
from ..report import exit_on_signals

INTERFACE = "eth0"  # of a machine
TOOLS = ("ip", "nsenter", "tc", "unshare")
BURST_SECONDS = 0.002  # of data may pass at once; the kernel's timers are finer
MIN_BURST_BYTES = 64 * 1024 + 1500  # a packet of TCP before it is cut for the wire passes whole
QUEUE_SECONDS = 0.05  # beyond that packets are lost, as in a switch
MIN_QUEUE_BYTES = 4 * MIN_BURST_BYTES
TRANSFER_SECONDS = 2.0  # of a plain transfer, about
PART_BYTES = 1 << 18
PATIENCE_SECONDS = 30.0


def token_bucket(bits_per_second: int) -> str:
    """Return the queueing discipline of `tc` that limits a sender to this rate.

    >>> token_bucket(1_000_000_000)
    'tbf rate 1000000000bit burst 250000 limit 6500000'
    """
    burst = max(MIN_BURST_BYTES, round(bits_per_second / 8 * BURST_SECONDS))
    queue = max(MIN_QUEUE_BYTES, round(bits_per_second / 8 * QUEUE_SECONDS))
    return f"tbf rate {bits_per_second}bit burst {burst} limit {burst + queue}"


def check_requirements() -> None:
    """Raise OSError if machines cannot be made here."""
    if os.geteuid() != 0:
        raise OSError("network namespaces need root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise OSError(f"not installed: {', '.join(missing)} (Debian packages iproute2, util-linux)")


def prepare(parser: argparse.ArgumentParser) -> None:
    """Exit with a message if machines cannot be made here, and remove them when this program is ended."""
    try:
        check_requirements()
    except OSError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    exit_on_signals()


class Machine(Namespace):
    """A namespace with an address on the switch."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.address = f"10.213.80.{10 + number}"

    def plug_in(self, switch: Namespace, bits_per_second: int) -> None:
        port, bucket = f"port{self.number}", token_bucket(bits_per_second)
        run(f"ip link add {port} netns {switch.pid} type veth peer name {INTERFACE} netns {self.pid}".split())
        switch.run(f"ip link set {port} master switch up")
        switch.run(f"tc qdisc add dev {port} root {bucket}")
        for command in (
            f"ip address add {self.address}/24 dev {INTERFACE}",
            f"ip link set {INTERFACE} up",
            "ip link set lo up",
            f"tc qdisc add dev {INTERFACE} root {bucket}",
        ):
            self.run(command)


def count_bytes() -> tuple[int, int]:
    """Return the bytes sent and received until now by the machine of the calling thread."""
    text = Path("/proc/thread-self/net/dev").read_text()
    [line] = re.findall(rf"^ *{INTERFACE}:(.*)$", text, re.MULTILINE)
    columns = line.split()
    return int(columns[8]), int(columns[0])


@contextmanager
def connected_machines(num_machines: int, bits_per_second: int) -> Iterator[list[Machine]]:
    """Yield so many machines with links of this rate, and remove them afterwards. Raises OSError."""
    check_requirements()
    with ExitStack() as stack:
        switch = Namespace()
        stack.callback(switch.close)
        switch.run("ip link add switch type bridge")
        switch.run("ip link set switch up")
        machines = []
        for number in range(num_machines):
            machines.append(Machine(number))
            stack.callback(machines[-1].close)
            machines[-1].plug_in(switch, bits_per_second)
        yield machines


def measure_bits_per_second(sender: Machine, receiver: Machine, bits_per_second: int) -> float:
    """Return the payload rate of a plain TCP transfer over a link of this nominal rate. Raises TimeoutError."""
    with receiver.call(socket.create_server, (receiver.address, 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        with sender.call(socket.create_connection, listener.getsockname(), PATIENCE_SECONDS) as outgoing:
            incoming, _ = listener.accept()
            with incoming:
                incoming.settimeout(PATIENCE_SECONDS)
                return _transfer(outgoing, incoming, int(bits_per_second / 8 * TRANSFER_SECONDS))


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
