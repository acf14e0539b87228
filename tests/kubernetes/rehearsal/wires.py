"""Network namespaces on one bridge, as pods of a cluster whose network plug-in enforces policies.

    the node: a bridge, 10.213.78.1  ═══ veth ═══ 10.213.78.10, a pod
                                     ═══ veth ═══ 10.213.78.11, another …

The bridge has its own namespace, so that the machine's network is not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from benchmarks import namespaces

from ...cluster.surroundings import run

NODE = "10.213.78.1"  # where the kubelet's probes come from
UNUSED = "10.213.78.2"  # of the node, without a listener, as a Service without a ready pod


class Namespace(namespaces.Namespace):
    """A network namespace with loopback."""

    def __init__(self) -> None:
        try:
            super().__init__()
        except OSError as error:
            pytest.skip(str(error))
        self.ip("link set lo up")

    def ip(self, arguments: str) -> None:
        run(*self.prefix, "ip", *arguments.split())

    def nft(self, rules: str) -> None:
        done = subprocess.run([*self.prefix, "nft", "-f", "-"], input=rules, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class Wires:
    """The node with its bridge, and the addresses of pods."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("a network namespace needs root")
        tools = ("ip", "nft", "nsenter", "unshare", "setpriv", "chroot", "mount")
        if missing := [tool for tool in tools if shutil.which(tool) is None]:
            pytest.skip(f"{' and '.join(missing)} are not installed (Debian packages iproute2, nftables, util-linux)")
        self.node = Namespace()
        self._taken = 9
        for command in (
            "link add bridge0 type bridge",
            f"address add {NODE}/24 dev bridge0",
            f"address add {UNUSED}/24 dev bridge0",
            "link set bridge0 up",
        ):
            self.node.ip(command)

    def plug(self) -> tuple[Namespace, str]:
        """Return a new namespace and its address."""
        pod = Namespace()
        self._taken += 1
        address = f"10.213.78.{self._taken}"
        run(*f"ip link add pod{pod.pid} netns {self.node.pid} type veth peer name eth0 netns {pod.pid}".split())
        self.node.ip(f"link set pod{pod.pid} master bridge0 up")
        for command in (f"address add {address}/24 dev eth0", "link set eth0 up", f"route add default via {NODE}"):
            pod.ip(command)
        return pod, address

    def unplug(self, pod: Namespace) -> None:
        """Disconnect a pod as if its machine had failed, so that it sends nothing more."""
        self.node.ip(f"link delete pod{pod.pid}")

    def close(self) -> None:
        self.node.close()
