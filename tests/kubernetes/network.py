"""Which connections NetworkPolicies allow.

https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .rendering import Object

Labels = Mapping[str, str]
Port = tuple[str, int]  # protocol, number


@dataclass(frozen=True)
class Place:
    """A pod as policies see it; `ports` are those that it serves, by name."""

    labels: Labels
    namespace: str
    ports: Mapping[str, Port] = field(default_factory=dict)

    @property
    def namespace_labels(self) -> Labels:
        return {"kubernetes.io/metadata.name": self.namespace}


def place_of(pod: Object, namespace: str) -> Place:
    """The place of a pod's only container."""
    [container] = pod["spec"]["containers"]
    ports = {port["name"]: (port.get("protocol", "TCP"), port["containerPort"]) for port in container["ports"]}
    return Place(pod["metadata"]["labels"], namespace, ports)


def selects(selector: Object, labels: Labels) -> bool:
    """Whether a label selector has nothing against these labels."""
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", "no other is used"
        if labels.get(one["key"]) not in one["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def allowed(policies: Iterable[Object], source: Place, target: Place) -> set[Port]:
    """What `source` may connect to: what it may send there, and that may receive."""
    policies = list(policies)
    return allowed_one_way(policies, "Egress", source, target) & allowed_one_way(policies, "Ingress", target, source)


def allowed_one_way(
    policies: Iterable[Object], direction: Literal["Ingress", "Egress"], own: Place, peer: Place
) -> set[Port]:
    """The ports of the connection's target that the policies of `own` allow in this direction; all that there are
    without any policy."""
    target = own if direction == "Ingress" else peer
    mine = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == own.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], own.labels)
    ]
    if not mine:
        return set(target.ports.values())
    peers, rules = ("from", "ingress") if direction == "Ingress" else ("to", "egress")
    return {
        port
        for spec in mine
        for rule in spec.get(rules, [])
        if any(_is_meant(who, peer, spec_namespace=own.namespace) for who in rule[peers])
        for said in rule["ports"]
        if (port := _port(said, target)) is not None
    }


def _is_meant(who: Object, peer: Place, *, spec_namespace: str) -> bool:
    assert who.keys() <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in who:
        if not selects(who["namespaceSelector"], peer.namespace_labels):
            return False
    elif peer.namespace != spec_namespace:
        return False
    return selects(who.get("podSelector", {}), peer.labels)


def _port(said: Object, target: Place) -> Port | None:
    if isinstance(said["port"], str):
        return target.ports.get(said["port"])
    port = said.get("protocol", "TCP"), said["port"]
    return port if port in target.ports.values() else None
