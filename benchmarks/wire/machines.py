"""Machines on one switch: network namespaces on a bridge, each on a link of a given rate, both ways.

    the switch: a bridge  ═══ tbf ═ veth ═ tbf ═══ 10.213.80.10, a machine
                          ═══ tbf ═ veth ═ tbf ═══ 10.213.80.11, another …

Whoever sends, a machine or the switch to it, is held to the rate by a token bucket (tc-tbf). The switch has a namespace
of its own, so that nothing of this is seen on the real machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..namespaces import Namespace, run

INTERFACE = "eth0"  # of a machine
TOOLS = ("ip", "nsenter", "tc", "unshare")
BURST_SECONDS = 0.002  # so much may pass at once; the kernel's timers are finer
MIN_BURST_BYTES = 64 * 1024 + 1500  # a packet of TCP before it is cut for the wire passes whole
QUEUE_SECONDS = 0.05  # what waits; beyond that packets are lost, as in a switch
MIN_QUEUE_BYTES = 4 * MIN_BURST_BYTES


def token_bucket(bits_per_second: int) -> str:
    """The queueing discipline that holds a sender to this rate, as `tc` takes it.

    >>> token_bucket(1_000_000_000)
    'tbf rate 1000000000bit burst 250000 limit 6500000'
    """
    burst = max(MIN_BURST_BYTES, round(bits_per_second / 8 * BURST_SECONDS))
    queue = max(MIN_QUEUE_BYTES, round(bits_per_second / 8 * QUEUE_SECONDS))
    return f"tbf rate {bits_per_second}bit burst {burst} limit {burst + queue}"


def check_requirements() -> None:
    """Raise OSError if there can be no machines here."""
    if os.geteuid() != 0:
        raise OSError("network namespaces need root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise OSError(f"not installed: {', '.join(missing)} (Debian packages iproute2, util-linux)")


class Machine(Namespace):
    """A namespace that has an address, once it is on the switch."""

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


@contextmanager
def connected_machines(num_machines: int, bits_per_second: int) -> Iterator[list[Machine]]:
    """So many machines, each reaching the others at this rate; gone at the end of the block. Raises OSError."""
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
