"""Where the trainers of a ring meet: a store of the lowest rank, at the address from which it reaches the coordinator.

https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from ps_config.hosts import authority, split_port

_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined] # not in its stubs
OWN_GROUP = "torch.distributed"  # instead of an address: the group that the scripts have made already


def address_towards(url: str) -> str:
    """The address of this machine from which it reaches a service, so that others reach it there. Sends nothing.

    Not its host name: in a container, or a network namespace, that may lead elsewhere. Raises OSError for an unknown
    name.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, target = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting it only makes the kernel pick the route
        probe.connect(target)
        return str(probe.getsockname()[0])


def open_store(host: str, patience: timedelta) -> tuple[Any, str]:
    """A new store on a free port of this address only, and where others find it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = _TCPStore(
        host,
        port,
        is_master=True,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # which the store closes
    )
    return store, authority(host, port)


def join_store(rendezvous: str, patience: timedelta) -> Any:
    """The store of another trainer. Blocks for it, up to `patience`."""
    host, port = split_port(rendezvous)
    return _TCPStore(host, int(port), is_master=False, timeout=patience, wait_for_workers=False)
