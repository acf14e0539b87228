"""The machines of a comparison: loopback, or network namespaces on a switch, each with a link of a given rate.

    the switch: a bridge  ═══ tbf ═ veth ═ tbf ═══ 10.213.80.10, a machine
                          ═══ tbf ═ veth ═ tbf ═══ 10.213.80.11, another …

A token bucket (tc-tbf) limits each sender, a machine or the switch, to the rate. The switch has its own namespace, so
that the real machine's network is not changed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TOOLS = ("ip", "tc", "unshare")
BURST_SECONDS = 0.002  # of data may pass at once; the kernel's timers are finer
MIN_BURST_BYTES = 64 * 1024 + 1500  # a packet of TCP before it is cut for the wire passes whole
QUEUE_SECONDS = 0.05  # beyond that packets are lost, as in a switch
MIN_QUEUE_BYTES = 4 * MIN_BURST_BYTES
TRANSFER_SECONDS = 2.0  # of a plain transfer, about
PART_BYTES = 1 << 18
PATIENCE_SECONDS = 30.0
_UNITS = {"mbit": 10**6, "gbit": 10**9}
_CLONE_NEWNET = 0x40000000


class Machine(Protocol):
    """A place for processes, with a network interface."""

    address: str
    interface: str

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function here, and return its result. Its sockets and processes stay on this machine."""
        ...


class Loopback:
    """The real machine, on which all processes use the loopback interface."""

    address = "127.0.0.1"
    interface = "lo"

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return function(*arguments, **named)


class Namespace:
    """A network namespace, which exists as long as a process in it.

    That process ends with its standard input, which the kernel closes even after `kill -9` of this one.
    """

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal must not end it
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if not self._keeper.stdout.readline():
            self.close()
            raise OSError("a network namespace cannot be created here")
        self.pid = self._keeper.pid

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function on a thread in this namespace, and return its result. Ctrl-C is raised after its end."""
        with ThreadPoolExecutor(1, initializer=self._enter) as thread:
            return thread.submit(function, *arguments, **named).result()

    def run(self, command: str) -> None:
        """Run `ip` or `tc` in it. Raises OSError with its output."""
        self.call(run, command)

    def close(self) -> None:
        self._keeper.communicate()  # closes its input

    def _enter(self) -> None:
        """Move the calling thread, and no other, into this namespace permanently."""
        with open(f"/proc/{self.pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


class LinkedMachine(Namespace):
    """A namespace with an address and a link to the switch."""

    interface = "eth0"

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.address = f"10.213.80.{10 + number}"

    def plug_in(self, switch: Namespace, bits_per_second: int) -> None:
        port, bucket = f"port{self.number}", token_bucket(bits_per_second)
        run(f"ip link add {port} netns {switch.pid} type veth peer name {self.interface} netns {self.pid}")
        switch.run(f"ip link set {port} master switch up")
        switch.run(f"tc qdisc add dev {port} root {bucket}")
        for command in (
            f"ip address add {self.address}/24 dev {self.interface}",
            f"ip link set {self.interface} up",
            "ip link set lo up",
            f"tc qdisc add dev {self.interface} root {bucket}",
        ):
            self.run(command)


def run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{command}: {done.stderr.strip()}")


def count_sent_bytes(machine: Machine) -> int:
    """Return the bytes that the machine has sent until now."""
    text = machine.call(Path("/proc/thread-self/net/dev").read_text)
    [line] = re.findall(rf"^ *{machine.interface}:(.*)$", text, re.MULTILINE)
    return int(line.split()[8])


def parse_rate(text: str) -> int:
    """Return the bits a second of a rate such as `1gbit` or `100mbit`. Raises ValueError.

    >>> parse_rate("100mbit")
    100000000
    """
    for unit, times in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * times)
    raise ValueError(f"{text} is not a rate such as 1gbit or 100mbit")


def token_bucket(bits_per_second: int) -> str:
    """Return the queueing discipline of `tc` that limits a sender to this rate.

    >>> token_bucket(1_000_000_000)
    'tbf rate 1000000000bit burst 250000 limit 6500000'
    """
    burst = max(MIN_BURST_BYTES, round(bits_per_second / 8 * BURST_SECONDS))
    queue = max(MIN_QUEUE_BYTES, round(bits_per_second / 8 * QUEUE_SECONDS))
    return f"tbf rate {bits_per_second}bit burst {burst} limit {burst + queue}"


@contextmanager
def connected_machines(num_machines: int, bits_per_second: int) -> Iterator[list[LinkedMachine]]:
    """Yield so many machines with links of this rate, and remove them afterwards. Raises OSError if it cannot."""
    if os.geteuid() != 0:
        raise OSError("network namespaces need root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise OSError(f"not installed: {', '.join(missing)} (Debian packages iproute2, util-linux)")
    with ExitStack() as stack:
        switch = Namespace()
        stack.callback(switch.close)
        switch.run("ip link add switch type bridge")
        switch.run("ip link set switch up")
        machines = []
        for number in range(num_machines):
            machines.append(LinkedMachine(number))
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
