"""A trainer in a network namespace of its own, whose packets a test drops one way, the other, or both.

    the machine: coordinator, pservers  ═══ 10.213.77.1 ═══ veth ═══ 10.213.77.2 ═══  the namespace: one trainer

The rules live in the namespace, and that with its link as long as a process in it, which is not long even if the test
is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest

HOST = "10.213.77.1"  # of the machine, for the namespace
_INSIDE = "10.213.77.2"

Direction = Literal["out", "in", "both"]

_TABLE = "add table inet cut; add chain inet cut {0} {{ type filter hook {0} priority 0 ; }}"


class Namespace:
    """What `prefix` starts runs in it."""

    def __init__(self, pid: int) -> None:
        self.prefix = ["nsenter", f"--net=/proc/{pid}/ns/net"]
        outside, inside = f"gp-{pid}", f"gp-in-{pid}"
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", str(pid))
        run("ip", "address", "add", f"{HOST}/30", "dev", outside)
        run("ip", "link", "set", outside, "up")
        for command in (f"address add {_INSIDE}/30 dev {inside}", f"link set {inside} up", "link set lo up"):
            run(*self.prefix, "ip", *command.split())
        for hook in ("input", "output"):
            self._nft(_TABLE.format(hook))

    def cut(self, port: int, direction: Direction) -> None:
        """From now on packets to (out) and from (in) this port of the machine are lost without a word."""
        if direction in ("out", "both"):
            self._nft(f"add rule inet cut output ip daddr {HOST} tcp dport {port} drop")
        if direction in ("in", "both"):
            self._nft(f"add rule inet cut input ip saddr {HOST} tcp sport {port} drop")

    def heal(self) -> None:
        """Everything passes again."""
        self._nft("flush table inet cut")

    def _nft(self, commands: str) -> None:
        run(*self.prefix, "nft", commands)


@contextmanager
def namespace() -> Iterator[Namespace]:
    """Gone at the end of the block, whatever happens in it. Skips where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    if missing := [tool for tool in ("ip", "nft", "nsenter", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} are not installed (Debian packages iproute2, nftables)")
    keeper = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 300"], stdout=subprocess.PIPE)
    with keeper:
        try:
            assert keeper.stdout is not None
            if not keeper.stdout.readline():
                pytest.skip("there can be no network namespace here")
            yield Namespace(keeper.pid)
        finally:
            keeper.kill()


def run(*command: str) -> None:
    """Raises OSError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
