"""Which connections NetworkPolicies let through. Pure; as networking.k8s.io/v1 says, for the fields used here.

A pod that no policy selects in a direction is free in it; one that some select may do what any of them allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deploy.manifests import Manifest

_PEER_FIELDS = {"podSelector", "namespaceSelector"}


@dataclass(frozen=True, slots=True)
class Pod:
    """One end of a connection."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    namespace_labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Flow:
    """One connection wanted."""

    source: Pod
    target: Pod
    port: int
    protocol: str = "TCP"

    def __str__(self) -> str:
        """For the reader of a failed test."""
        return f"{self.source.name} -> {self.target.name}:{self.port}/{self.protocol}"


def admits(policies: Iterable[Manifest], flow: Flow) -> bool:
    """Whether both ends' policies let it through."""
    policies = tuple(policies)
    return _allows(policies, flow, flow.source, flow.target, "Egress", "to") and _allows(
        policies, flow, flow.target, flow.source, "Ingress", "from"
    )


def _allows(policies: tuple[Manifest, ...], flow: Flow, own: Pod, other: Pod, direction: str, peers_field: str) -> bool:
    selecting = [
        policy
        for policy in policies
        if direction in policy["spec"]["policyTypes"]
        and policy["metadata"]["namespace"] == own.namespace
        and _selects(policy["spec"]["podSelector"], own.labels)
    ]
    rules = [
        (policy["metadata"]["namespace"], rule)
        for policy in selecting
        for rule in policy["spec"].get(direction.lower(), [])
    ]
    return not selecting or any(
        _port_matches(rule, flow) and _peer_matches(rule.get(peers_field), namespace, other)
        for namespace, rule in rules
    )


def _port_matches(rule: dict[str, Any], flow: Flow) -> bool:
    if "ports" not in rule:
        return True
    return any(
        port.get("protocol", "TCP") == flow.protocol and port["port"] <= flow.port <= port.get("endPort", port["port"])
        for port in rule["ports"]
    )


def _peer_matches(peers: list[dict[str, Any]] | None, namespace: str, other: Pod) -> bool:
    if not peers:
        return True
    return any(_one_peer_matches(peer, namespace, other) for peer in peers)


def _one_peer_matches(peer: dict[str, Any], namespace: str, other: Pod) -> bool:
    assert peer.keys() <= _PEER_FIELDS, peer
    if "namespaceSelector" in peer:
        at_home = _selects(peer["namespaceSelector"], other.namespace_labels)
    else:
        at_home = other.namespace == namespace
    return at_home and _selects(peer.get("podSelector", {}), other.labels)


def _selects(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, selector
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()
