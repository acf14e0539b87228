"""The example of a Kubeflow TrainJob: valid, and its pods are those of the base's Job."""

from __future__ import annotations

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from kubernetes_validate.utils import validate

from .rendering import Object, of_kind, pods
from .test_schemas import VERSIONS

EXAMPLE = "examples"
MODELS = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_what_kubeflow_takes(kind: str) -> None:
    """Its models leave out what they do not know: whatever is kept is known, and of the right type."""
    [one] = of_kind(EXAMPLE, kind)
    parsed = MODELS[kind].from_dict(one)
    assert parsed is not None
    assert parsed.to_dict() == one


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_in_it_is_what_kubernetes_takes(version: str) -> None:
    [runtime] = of_kind(EXAMPLE, "TrainingRuntime")
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": job["template"]["spec"]}
    validate(job, version, strict=True)


def test_its_pods_are_those_of_the_base() -> None:
    """But for the name of the container, and for who says rank and number."""
    [ours] = [pod for name, pod in pods("base") if name == "trainer"]
    [theirs] = [pod for name, pod in pods(EXAMPLE) if name == "trainer"]
    assert theirs["metadata"]["labels"].items() <= ours["metadata"]["labels"].items()
    [our_container], [their_container] = (pod["spec"]["containers"] for pod in (ours, theirs))

    def own(container: Object) -> list[Object]:
        return [one for one in container["env"] if one["name"].startswith("GRADPOST_")]

    assert own(our_container) == own(their_container)
    assert {**our_container, "name": "node", "env": []} == {**their_container, "env": []}
    assert {**ours["spec"], "containers": []} == {**theirs["spec"], "containers": []}
