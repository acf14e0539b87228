"""What `kubectl kustomize` makes of each overlay."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
OVERLAYS = ["base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir())]
CORE_GROUPS = ("v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1")

Object = dict[str, Any]


@functools.cache
def render(overlay: str) -> list[Object]:
    """All objects of an overlay. Needs kubectl, or kustomize; nothing else, and no file that is not in the project."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, KUBERNETES / overlay], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("needs kubectl or kustomize, to render manifests")


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    """The objects of these kinds."""
    return [one for one in render(overlay) if one["kind"] in kinds]


def pods(overlay: str) -> Iterator[tuple[str, Object]]:
    """Name and pod template of everything that makes pods."""
    for one in of_kind(overlay, "Deployment", "StatefulSet", "Job"):
        yield one["metadata"]["name"], one["spec"]["template"]


def environment(overlay: str, pod: Object) -> dict[str, Any]:
    """The variables of a pod's only container: text, or where it comes from."""
    [container] = pod["spec"]["containers"]
    [settings] = of_kind(overlay, "ConfigMap")
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    own = {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", [])}
    return {**settings["data"], **own}
