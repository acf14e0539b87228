"""Every object fits the schemas of Kubernetes, and the TrainJob those of Kubeflow."""

from __future__ import annotations

import json

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from kubernetes_validate.utils import all_versions, major_minor, validate

from ..soaking import parametrize_sampled
from .rendering import CORE_GROUPS, OVERLAYS, Object, of_kind, pods, render

OLDEST = 29  # 1.29
VERSIONS = sorted({major_minor(version) for version in all_versions() if int(version.split(".")[1]) >= OLDEST})


@parametrize_sampled("version", VERSIONS, [VERSIONS[0], VERSIONS[-1]])
def test_every_object_fits_its_schema(version: str) -> None:
    different = {json.dumps(one): one for overlay in OVERLAYS for one in render(overlay)}
    for one in different.values():
        if one["apiVersion"] in CORE_GROUPS:
            validate(one, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_is_in_the_namespace(overlay: str) -> None:
    [namespace] = of_kind(overlay, "Namespace")
    for one in render(overlay):
        if one is not namespace:
            assert one["metadata"]["namespace"] == namespace["metadata"]["name"], one


# ---------------------------------------------------------------- Kubeflow

EXAMPLE = "examples"
MODELS = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}


@pytest.mark.parametrize("kind", MODELS)
def test_the_train_job_fits_kubeflows_models(kind: str) -> None:
    """Kubeflow's models drop unknown members, so equality shows that all are known and valid."""
    [one] = of_kind(EXAMPLE, kind)
    parsed = MODELS[kind].from_dict(one)
    assert parsed is not None
    assert parsed.to_dict() == one


@parametrize_sampled("version", VERSIONS, [VERSIONS[0], VERSIONS[-1]])
def test_the_job_of_the_runtime_fits_its_schema(version: str) -> None:
    [runtime] = of_kind(EXAMPLE, "TrainingRuntime")
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": job["template"]["spec"]}
    validate(job, version, strict=True)


def test_the_pods_of_the_train_job_are_those_of_the_base() -> None:
    """They differ in the name of the container, and in the source of rank and number."""
    [ours] = [pod for name, pod in pods("base") if name == "trainer"]
    [theirs] = [pod for name, pod in pods(EXAMPLE) if name == "trainer"]
    assert theirs["metadata"]["labels"].items() <= ours["metadata"]["labels"].items()
    [our_container], [their_container] = (pod["spec"]["containers"] for pod in (ours, theirs))

    def own(container: Object) -> list[Object]:
        return [one for one in container["env"] if one["name"].startswith("GRADPOST_")]

    assert own(our_container) == own(their_container)
    assert {**our_container, "name": "node", "env": []} == {**their_container, "env": []}
    assert {**ours["spec"], "containers": []} == {**theirs["spec"], "containers": []}
