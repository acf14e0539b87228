"""All members as Prometheus' HTTP service discovery wants them.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from .cluster import Cluster


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


def _group(address: str, **labels: str) -> dict[str, Any]:
    url = urlsplit(address)
    labels = {"__scheme__": url.scheme, "__metrics_path__": f"{url.path.rstrip('/')}/metrics", **labels}
    return {"targets": [url.netloc], "labels": labels}
