"""The requests of Prometheus that the operator's monitors define."""

from __future__ import annotations

import http.client
import socket
import ssl
from pathlib import Path

from ..network import selects
from ..rendering import Object
from .cluster import Cluster
from .pod import Pod


def scrape(cluster: Cluster) -> dict[str, str]:
    """Return the page of every pod that a monitor selects, requested from the pod of Prometheus."""
    network = cluster.add_stranger("prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring")
    pages = {}
    for monitor in cluster.objects:
        if monitor["kind"] not in ("ServiceMonitor", "PodMonitor"):
            continue
        [endpoint] = monitor["spec"]["endpoints" if monitor["kind"] == "ServiceMonitor" else "podMetricsEndpoints"]
        for name, pod in cluster.pods.items():
            behind_service = pod.role in {
                one["metadata"]["name"]
                for one in cluster.objects
                if one["kind"] == "Service" and selects(monitor["spec"]["selector"], one["metadata"]["labels"])
            }
            is_meant = selects(monitor["spec"]["selector"], pod.place.labels)
            if behind_service if monitor["kind"] == "ServiceMonitor" else is_meant:
                pages[name] = network.call(_ask, cluster, pod, endpoint)
    return pages


def _ask(cluster: Cluster, pod: Pod, endpoint: Object) -> str:
    _, port = pod.place.ports[endpoint["port"]]
    connection = http.client.HTTPConnection(pod.address, port)
    connection.sock = socket.create_connection((pod.address, port), timeout=10)
    if endpoint.get("scheme") == "https":
        tls = endpoint["tlsConfig"]
        connection.sock = _context(cluster, tls).wrap_socket(connection.sock, server_hostname=tls["serverName"])
    headers = {}
    if "authorization" in endpoint:
        credentials = endpoint["authorization"]["credentials"]
        token = cluster.secrets[credentials["name"]][credentials["key"]].decode()
        headers = {"authorization": f"Bearer {token}"}
    try:
        connection.request("GET", "/metrics", headers=headers)
        response = connection.getresponse()
        page = response.read().decode()
        assert response.status == 200, page
        return page
    finally:
        connection.close()


def _context(cluster: Cluster, tls: Object) -> ssl.SSLContext:
    folder = Path(cluster.folder, "prometheus")
    folder.mkdir(exist_ok=True)
    files = {}
    for which, reference in (("ca", tls["ca"]["secret"]), ("cert", tls["cert"]["secret"]), ("key", tls["keySecret"])):
        files[which] = folder / which
        files[which].write_bytes(cluster.secrets[reference["name"]][reference["key"]])
    context = ssl.create_default_context(cafile=str(files["ca"]))
    context.load_cert_chain(files["cert"], files["key"])
    return context
