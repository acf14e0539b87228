"""All members as Prometheus' HTTP service discovery wants them.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from ps_config.hosts import is_ip_literal, is_loopback, reachable_host
from services.runtime.security import KnownHosts

from .cluster import Cluster


class TargetGroup(BaseModel):
    """Members of one role, in the format of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


def describe_targets(cluster: Cluster) -> list[dict[str, Any]]:
    """One target group for each pserver and trainer that serves `/metrics`, with its role and number as labels.

    The coordinator itself is not in it: whoever asks knows its address.
    """
    groups = [
        _group(member.info.address, role="pserver", pserver=str(index))
        for index, member in sorted(cluster.registry.members.items())
    ]
    groups += [
        _group(trainer.metrics_address, role="trainer", trainer=str(rank))
        for rank, trainer in sorted(cluster.run.trainers.items())
        if trainer.metrics_address and trainer.is_here
    ]
    return groups


def is_own_address(address: str, client: str, server: str, hosts: KnownHosts) -> bool:
    """Return whether Prometheus may be sent to the address of a trainer that joined from `client` at `server`.

    Prometheus sends its token there. So the host is that of the trainer's own connection, or one that `hosts` lists.
    On the coordinator's machine it may also be the loopback, or the machine's address in the network.
    """
    host = urlsplit(address).hostname or ""
    peer, own = _normalize(client), _normalize(server)
    is_here = is_loopback(peer) or peer == own
    if is_loopback(host):
        return is_here
    return _normalize(host) == peer or hosts.lists(host) or (is_here and host in (own, reachable_host("0.0.0.0")))


def _normalize(host: str) -> str:
    if not is_ip_literal(host):
        return host
    address = ipaddress.ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _group(address: str, **labels: str) -> dict[str, Any]:
    url = urlsplit(address)
    labels = {"__scheme__": url.scheme, "__metrics_path__": f"{url.path.rstrip('/')}/metrics", **labels}
    return {"targets": [url.netloc], "labels": labels}
