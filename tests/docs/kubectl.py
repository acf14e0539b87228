"""What `kubectl` is told to do in the documents, held against the manifests: no cluster is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from .markdown import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OBJECTS: dict[str, dict[str, Any]] = {
    f"{one['kind'].lower()}/{one['metadata']['name']}": one
    for file in (KUBERNETES / "base").glob("*.yaml")
    for one in yaml.safe_load_all(file.read_text())
    if "metadata" in one
}


def check_kubectl(words: list[str]) -> None:
    if words[0] == "-n":
        assert f"namespace/{words[1]}" in OBJECTS
        words = words[2:]
    verb, *rest = words
    KUBECTL[verb](rest)


def existing(words: list[str]) -> None:
    """`job trainer`, or `job/trainer statefulset/pserver`."""
    named = words if "/" in words[0] else [f"{words[0]}/{name}" for name in words[1:]]
    assert named
    assert set(named) <= OBJECTS.keys(), OBJECTS.keys()


def applied(words: list[str]) -> None:
    flag, folder = words
    assert flag == "-k"
    assert (ROOT / folder / "kustomization.yaml").is_file()


def created(words: list[str]) -> None:
    """The namespace of the manifests, or the Secret that they expect."""
    if words[:2] == ["secret", "generic"]:
        assert f"secretName: {words[2]}\n" in (KUBERNETES / "base" / "coordinator.yaml").read_text()
    else:
        existing(words)


def forwarded(words: list[str]) -> None:
    service, port = words
    assert int(port) in [one["port"] for one in OBJECTS[service]["spec"]["ports"]]


def rolled_out(words: list[str]) -> None:
    assert words[0] in ("restart", "status")
    existing(words[1:])


KUBECTL: dict[str, Callable[[list[str]], None]] = {
    "apply": applied,
    "create": created,
    "delete": existing,
    "drain": lambda words: None,
    "logs": lambda words: existing([word for word in words if word != "-f"]),
    "port-forward": forwarded,
    "rollout": rolled_out,
}
