"""The surroundings of services: a network that drops packets, and a small disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

# ---------------------------------------------------------------------- a network namespace
#
#     the machine: coordinator, pservers  ═══ 10.213.77.1 ═══ veth ═══ 10.213.77.2 ═══  the namespace: one trainer
#
# The rules and the link last as long as a process in the namespace, which is not long even if the test is killed.

HOST = "10.213.77.1"  # of the machine, for the namespace
INSIDE = "10.213.77.2"  # of the namespace, for the machine
Direction = Literal["out", "in", "both"]
_TABLE = "add table inet cut; add chain inet cut {0} {{ type filter hook {0} priority 0 ; }}"


class Namespace:
    """A network namespace; a command behind `prefix` runs in it."""

    def __init__(self, pid: int) -> None:
        self.prefix = ["nsenter", f"--net=/proc/{pid}/ns/net"]
        outside, inside = f"gp-{pid}", f"gp-in-{pid}"
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", str(pid))
        run("ip", "address", "add", f"{HOST}/30", "dev", outside)
        run("ip", "link", "set", outside, "up")
        for command in (f"address add {INSIDE}/30 dev {inside}", f"link set {inside} up", "link set lo up"):
            run(*self.prefix, "ip", *command.split())
        for hook in ("input", "output"):
            self._nft(_TABLE.format(hook))

    def cut(self, port: int, direction: Direction) -> None:
        """Drop packets to (out) and from (in) this port of the machine."""
        if direction in ("out", "both"):
            self._nft(f"add rule inet cut output ip daddr {HOST} tcp dport {port} drop")
        if direction in ("in", "both"):
            self._nft(f"add rule inet cut input ip saddr {HOST} tcp sport {port} drop")

    def heal(self) -> None:
        """Let everything pass again."""
        self._nft("flush table inet cut")

    def _nft(self, commands: str) -> None:
        run(*self.prefix, "nft", commands)


@contextmanager
def namespace() -> Iterator[Namespace]:
    """Make a namespace for the length of the block. Skips the test where there can be none."""
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
    """Run a command. Raises OSError with its stderr."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


# ---------------------------------------------------------------------- a small disk


class SmallDisk:
    """A file system of a few MiB; `fill` leaves not one page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12):
                with contextlib.suppress(OSError):  # that there is no space left
                    while True:
                        file.write(bytes(size))

    def make_room(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, size: str = "4m") -> Iterator[SmallDisk]:
    """Mount a small disk at `folder` for the length of the block. Skips the test where that is not permitted."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "gradpost-test", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
