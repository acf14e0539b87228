"""The addresses, allowed connections and scraped pods of every overlay."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from .network import Place, allowed, place_of, selects
from .rendering import OVERLAYS, Object, environment, of_kind, pods

NAMESPACE = "gradpost"
CALLS = {("pserver", "coordinator"), ("trainer", "coordinator"), ("coordinator", "pserver"), ("trainer", "pserver")}
FIELDS = {
    "metadata.name": "pserver-1",
    "metadata.namespace": NAMESPACE,
    "metadata.labels['apps.kubernetes.io/pod-index']": "1",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "1",
}
PROMETHEUS = Place({"app.kubernetes.io/name": "prometheus"}, "monitoring")
DNS = Place({"k8s-app": "kube-dns"}, "kube-system", {"dns": ("UDP", 53), "dns-tcp": ("TCP", 53)})
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def places(overlay: str) -> dict[str, Place]:
    return {name: place_of(pod, NAMESPACE) for name, pod in pods(overlay)}


def certificates(overlay: str) -> dict[str, list[str]]:
    """Return the DNS names of each certificate, by its Secret."""
    found = of_kind(overlay, "Certificate")
    return {one["spec"]["secretName"]: one["spec"].get("dnsNames", []) for one in found}


def matches_name(names: list[str], host: str) -> bool:
    """Match names as OpenSSL, which accepts a wildcard only before two labels."""
    _, _, rest = host.partition(".")
    return host in names or ("." in rest and f"*.{rest}" in names)


@every_overlay
def test_only_the_connections_of_a_cluster_are_allowed(overlay: str) -> None:
    policies = of_kind(overlay, "NetworkPolicy")
    roles = places(overlay)
    trainer = roles["trainer"]
    others = {
        "prometheus": PROMETHEUS,
        "dns": DNS,
        "stranger": Place({}, NAMESPACE, {"http": ("TCP", 8080)}),
        "trainer elsewhere": Place(trainer.labels, "default", trainer.ports),
        "prometheus elsewhere": Place(PROMETHEUS.labels, "default"),
    }
    all_places = {**roles, **others}
    is_monitored = bool(of_kind(overlay, "ServiceMonitor"))
    [settings] = of_kind(overlay, "ConfigMap")
    calls = CALLS | ({("pserver", "pserver")} if "GRADPOST_STANDBYS" in settings["data"] else set())
    for source in all_places:
        for target in all_places:
            if not {source, target} & (roles.keys() | {"stranger"}):
                continue  # outside this namespace
            expected = set()
            if (source, target) in calls or (source == "prometheus" and target in roles and is_monitored):
                expected = set(all_places[target].ports.values())
            if target == "dns":
                expected = set(DNS.ports.values())
            assert allowed(policies, all_places[source], all_places[target]) == expected, (source, target)


@every_overlay
def test_services_find_their_pods_and_name_their_protocol(overlay: str) -> None:
    scheme = "https" if certificates(overlay) else "http"
    for service in of_kind(overlay, "Service"):
        place = places(overlay)[service["metadata"]["name"]]
        assert selects({"matchLabels": service["spec"]["selector"]}, place.labels)
        [port] = service["spec"]["ports"]
        assert place.ports[port["targetPort"]] == ("TCP", port["port"])
        # With TLS the handshake selects HTTP/2; without it the protocol must be known.
        assert port["appProtocol"] == {"http": "kubernetes.io/h2c", "https": "https"}[scheme]
    [pservers] = of_kind(overlay, "StatefulSet")
    [headless] = [one for one in of_kind(overlay, "Service") if one["spec"].get("clusterIP") == "None"]
    assert headless["metadata"]["name"] == pservers["spec"]["serviceName"]
    assert headless["spec"]["publishNotReadyAddresses"] is True  # its run is installed before it is ready


@every_overlay
def test_addresses_are_service_names_with_certificates(overlay: str) -> None:
    scheme = "https" if certificates(overlay) else "http"
    ports = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in of_kind(overlay, "Service")}
    for name, pod in pods(overlay):
        variables = environment(of_kind(overlay, "ConfigMap"), pod, FIELDS)
        assert "$(" not in str(variables)
        coordinator = urlsplit(variables["GRADPOST_COORDINATOR"])
        assert (coordinator.scheme, coordinator.hostname, coordinator.port) == (
            scheme,
            "coordinator",
            ports["coordinator"],
        )
        if name == "coordinator":
            allowed_hosts = variables["GRADPOST_ALLOWED_HOSTS"].split(",")
            assert allowed_hosts == [
                f"coordinator.{NAMESPACE}{suffix}" for suffix in ("", ".svc", ".svc.cluster.local")
            ]
        own = variables.get("GRADPOST_ADVERTISE_ADDRESS")  # by default that of the pod, which is in no certificate
        is_named = name == "pserver" and scheme == "https"
        assert own == (f"https://pserver-1.pserver.{NAMESPACE}.svc:{ports['pserver']}" if is_named else None)
    if scheme == "https":
        names = certificates(overlay)
        assert matches_name(names["coordinator-tls"], "coordinator")
        for index in range(4):  # standbys as well
            assert matches_name(names["pserver-tls"], f"pserver-{index}.pserver.gradpost.svc")
        assert all(matches_name(names[secret], "localhost") for secret in ("coordinator-tls", "pserver-tls"))


def monitors(overlay: str) -> list[tuple[Object, Object]]:
    """Return each monitor with its only endpoint."""
    found = []
    for one in of_kind(overlay, "ServiceMonitor", "PodMonitor"):
        [endpoint] = one["spec"]["endpoints" if one["kind"] == "ServiceMonitor" else "podMetricsEndpoints"]
        found.append((one, endpoint))
    return found


@every_overlay
def test_pods_are_scraped_with_the_labels_of_our_service_discovery(overlay: str) -> None:
    if not monitors(overlay):
        return
    scraped = {}
    for monitor, endpoint in monitors(overlay):
        credentials = {"type": "Bearer", "credentials": {"name": "gradpost-tokens", "key": "read"}}
        assert endpoint.get("authorization") == (credentials if monitor["kind"] == "ServiceMonitor" else None)
        behind = of_kind(overlay, "Service") if monitor["kind"] == "ServiceMonitor" else [
            {"metadata": {"name": name, **pod["metadata"]}} for name, pod in pods(overlay)
        ]  # fmt: skip
        for one in behind:
            if selects(monitor["spec"]["selector"], one["metadata"]["labels"]):
                assert endpoint["port"] in places(overlay)[one["metadata"]["name"]].ports
                scraped[one["metadata"]["name"]] = {rule["targetLabel"] for rule in endpoint["relabelings"]}
    # Those of services/coordinator/metrics.py; one that is empty, as for the coordinator, is none.
    service = {"role", "pserver"}
    assert scraped == {"coordinator": service, "pserver": service, "trainer": {"role", "trainer"}}


@every_overlay
def test_prometheus_shows_a_certificate_under_mutual_tls(overlay: str) -> None:
    names = certificates(overlay)
    for _, endpoint in monitors(overlay):
        assert endpoint.get("scheme", "http") == ("https" if names else "http")
        if names:
            tls = endpoint["tlsConfig"]
            assert {tls["ca"]["secret"]["name"], tls["cert"]["secret"]["name"], tls["keySecret"]["name"]} == {
                "prometheus-tls"
            }
            # It connects to addresses, which are in no certificate.
            assert all(tls["serverName"] in names[f"{role}-tls"] for role in places(overlay))
