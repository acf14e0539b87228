"""Every object is one that Kubernetes takes."""

from __future__ import annotations

import json

import pytest
from kubernetes_validate.utils import all_versions, major_minor, validate

from .rendering import CORE_GROUPS, OVERLAYS, of_kind, render

OLDEST = 29  # 1.29
VERSIONS = sorted({major_minor(version) for version in all_versions() if int(version.split(".")[1]) >= OLDEST})


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(version: str) -> None:
    different = {json.dumps(one): one for overlay in OVERLAYS for one in render(overlay)}
    for one in different.values():
        if one["apiVersion"] in CORE_GROUPS:
            validate(one, version, strict=True)


def test_what_has_no_schema_here_is_known() -> None:
    everything = [one for overlay in OVERLAYS for one in render(overlay)]
    assert {(one["apiVersion"], one["kind"]) for one in everything if one["apiVersion"] not in CORE_GROUPS} == {
        ("cert-manager.io/v1", "Certificate"),
        ("cert-manager.io/v1", "Issuer"),
        ("monitoring.coreos.com/v1", "PodMonitor"),
        ("monitoring.coreos.com/v1", "PrometheusRule"),
        ("monitoring.coreos.com/v1", "ServiceMonitor"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),  # see test_trainjob.py
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_is_in_the_namespace(overlay: str) -> None:
    [namespace] = of_kind(overlay, "Namespace")
    for one in render(overlay):
        if one is not namespace:
            assert one["metadata"]["namespace"] == namespace["metadata"]["name"], one
