"""The connections that NetworkPolicies allow.

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
    """A pod as policies select it; `ports` are those that it serves, by name."""

    labels: Labels
    namespace: str
    ports: Mapping[str, Port] = field(default_factory=dict)

    @property
    def namespace_labels(self) -> Labels:
        return {"kubernetes.io/metadata.name": self.namespace}


def place_of(pod: Object, namespace: str) -> Place:
    """Return the place of a pod with one container."""
    [container] = pod["spec"]["containers"]
    ports = {port["name"]: (port.get("protocol", "TCP"), port["containerPort"]) for port in container["ports"]}
    return Place(pod["metadata"]["labels"], namespace, ports)


def selects(selector: Object, labels: Labels) -> bool:
    """Return whether a label selector matches these labels."""
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", "no other is used"
        if labels.get(one["key"]) not in one["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def allowed(policies: Iterable[Object], source: Place, target: Place) -> set[Port]:
    """Return the ports of `target` that `source` may connect to, by egress and ingress policies."""
    policies = list(policies)
    return allowed_one_way(policies, "Egress", source, target) & allowed_one_way(policies, "Ingress", target, source)


def allowed_one_way(
    policies: Iterable[Object], direction: Literal["Ingress", "Egress"], own: Place, peer: Place
) -> set[Port]:
    """Return the ports of the connection's target that the policies of `own` allow in this direction.

    Without any policy all ports are allowed.
    """
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
        if any(_matches(selector, peer, own.namespace) for selector in rule[peers])
        for port_rule in rule["ports"]
        if (port := _port(port_rule, target)) is not None
    }


def _matches(selector: Object, peer: Place, namespace: str) -> bool:
    assert selector.keys() <= {"podSelector", "namespaceSelector"}
    own_namespace = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    is_in = selects(selector.get("namespaceSelector", own_namespace), peer.namespace_labels)
    return is_in and selects(selector.get("podSelector", {}), peer.labels)


def _port(rule: Object, target: Place) -> Port | None:
    if isinstance(rule["port"], str):
        return target.ports.get(rule["port"])
    port = rule.get("protocol", "TCP"), rule["port"]
    return port if port in target.ports.values() else None
