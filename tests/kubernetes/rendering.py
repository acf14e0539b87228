"""The objects that `kubectl kustomize` renders from each overlay, and the pods that Kubernetes would make of them."""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
OVERLAYS = ["base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir()), "examples"]
CORE_GROUPS = ("v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1")

Object = dict[str, Any]

_REFERENCE = re.compile(r"\$\(([A-Za-z_][\w.-]*)\)")


@functools.cache
def render(overlay: str) -> list[Object]:
    """Return all objects of an overlay. Needs kubectl or kustomize."""
    return render_folder(KUBERNETES / overlay)


def render_folder(folder: Path) -> list[Object]:
    """Return all objects of a folder with a kustomization."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, folder], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("needs kubectl or kustomize, to render manifests", allow_module_level=True)


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    """Return the objects of these kinds."""
    return [one for one in render(overlay) if one["kind"] in kinds]


def pods(overlay: str) -> Iterator[tuple[str, Object]]:
    """Yield role and pod template of each object that makes pods."""
    for one in of_kind(overlay, "Deployment", "StatefulSet", "Job"):
        yield one["metadata"]["name"], one["spec"]["template"]
    for job in of_kind(overlay, "TrainJob"):
        yield "trainer", pod_of_train_job(job, *of_kind(overlay, "TrainingRuntime"))


def pod_of_train_job(job: Object, runtime: Object) -> Object:
    """Return the pod that Kubeflow's controller makes of both, as far as we use it (with its plugin `torch`).

    https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
    """
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert "torch" in runtime["spec"]["mlPolicy"]
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    pod: Object = copy.deepcopy(replicated["template"]["spec"]["template"])
    [container] = pod["spec"]["containers"]
    assert container["name"] == "node"
    trainer = job["spec"]["trainer"]
    container.update({key: trainer[key] for key in ("args", "command", "image") if key in trainer})
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container["env"] += [
        {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
        {"name": "PET_NPROC_PER_NODE", "value": "auto"},
        {"name": "PET_NODE_RANK", "valueFrom": index},
    ]
    return pod


def variables(objects: list[Object], pod: Object) -> dict[str, Any]:
    """Return the variables of a pod's only container: text, or its source."""
    [container] = pod["spec"]["containers"]
    [settings] = [one for one in objects if one["kind"] == "ConfigMap"]
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    own = {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", [])}
    return {**settings["data"], **own}


def environment(objects: list[Object], pod: Object, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of the pod; variables may refer to its `fields`.

    A reference to a later variable is not replaced, as in Kubernetes.
    """
    known: dict[str, str] = {}
    for name, value in variables(objects, pod).items():
        text = value if isinstance(value, str) else fields[value["fieldRef"]["fieldPath"]]
        known[name] = _REFERENCE.sub(lambda match: known.get(match[1], match[0]), text)
    return known
