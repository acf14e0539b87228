"""What every overlay keeps to."""

from __future__ import annotations

import pytest

from ps_protocol.environment import check_environment
from services.coordinator.settings import CoordinatorSettings
from services.pserver.settings import PserverSettings

from .rendering import OVERLAYS, Object, environment, of_kind, pods, render

ROLES = {"coordinator": CoordinatorSettings, "pserver": PserverSettings}

every_pod = pytest.mark.parametrize(
    ("overlay", "name", "pod"),
    [pytest.param(o, name, pod, id=f"{o} {name}") for o in OVERLAYS for name, pod in pods(o)],
)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@every_pod
def test_pod_security_is_restricted(overlay: str, name: str, pod: Object) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001  # the image's
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    for volume in spec["volumes"]:
        assert volume.keys() & {"secret", "emptyDir", "persistentVolumeClaim", "configMap"}, volume


@every_overlay
def test_the_namespace_enforces_it(overlay: str) -> None:
    [namespace] = of_kind(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@every_pod
def test_nothing_talks_to_the_api_server_or_gets_variables_of_services(overlay: str, name: str, pod: Object) -> None:
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["enableServiceLinks"] is False  # a service `gradpost-x` would set GRADPOST_X_PORT


@every_pod
def test_every_container_asks_for_what_it_needs_and_is_probed(overlay: str, name: str, pod: Object) -> None:
    [container] = pod["spec"]["containers"]
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    probes = {"startupProbe", "livenessProbe", "readinessProbe"}
    assert container.keys() & probes == (probes if name in ROLES else set())
    ports = {port["name"] for port in container["ports"]}
    for probe in container.keys() & probes:
        [how] = [container[probe][key] for key in ("httpGet", "tcpSocket") if key in container[probe]]
        assert how["port"] in ports
        assert container[probe].get("httpGet", {}).get("path", "/healthz") in ("/healthz", "/readyz")


@every_pod
def test_images_are_tagged_and_no_secret_is_in_the_environment(overlay: str, name: str, pod: Object) -> None:
    [container] = pod["spec"]["containers"]
    assert container["image"].startswith("gradpost:")
    for value in environment(overlay, pod).values():
        assert not isinstance(value, dict) or "secretKeyRef" not in value
    assert "--insecure" not in container["args"]
    for volume in pod["spec"]["volumes"]:
        assert volume.get("secret", {"defaultMode": 0o400})["defaultMode"] == 0o400


@every_pod
def test_every_variable_is_one_that_gradpost_knows(overlay: str, name: str, pod: Object) -> None:
    variables = environment(overlay, pod)
    check_environment(variables)
    assert "GRADPOST_INSECURE" not in variables


@every_pod
def test_services_take_their_environment(
    overlay: str, name: str, pod: Object, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if name not in ROLES:
        return
    files = tmp_path_factory.mktemp("tls")
    for variable, value in environment(overlay, pod).items():
        if isinstance(value, dict):
            value = "1"  # the index of a pod
        if str(value).startswith("/etc/gradpost/tls/"):
            path = files / str(value).rpartition("/")[2]
            path.touch()
            value = str(path)
        monkeypatch.setenv(variable, value)
    settings = ROLES[name](tokens_dir=files)
    [container] = pod["spec"]["containers"]
    [port] = container["ports"]
    assert settings.port == port["containerPort"]
    assert settings.host == "0.0.0.0"


@every_overlay
def test_numbers_agree(overlay: str) -> None:
    [settings] = of_kind(overlay, "ConfigMap")
    [pservers] = of_kind(overlay, "StatefulSet")
    [trainers] = of_kind(overlay, "Job")
    assert settings["data"]["GRADPOST_NUM_PSERVERS"] == str(pservers["spec"]["replicas"])
    assert settings["data"]["GRADPOST_NUM_TRAINERS"] == str(trainers["spec"]["completions"])
    assert trainers["spec"]["parallelism"] == trainers["spec"]["completions"]
    [pod] = [pod for name, pod in pods(overlay) if name == "trainer"]
    assert environment(overlay, pod)["WORLD_SIZE"] == str(trainers["spec"]["completions"])


@every_overlay
def test_services_find_their_pods_and_name_their_protocol(overlay: str) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay)}
    ports = {name: {port["name"] for port in pod["spec"]["containers"][0]["ports"]} for name, pod in pods(overlay)}
    for service in of_kind(overlay, "Service"):
        name = service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= labels[name].items()
        [port] = service["spec"]["ports"]
        assert port["targetPort"] in ports[name]
        assert port["appProtocol"] == ("https" if overlay == "overlays/mutual-tls" else "kubernetes.io/h2c")
    [pservers] = of_kind(overlay, "StatefulSet")
    headless = [s["metadata"]["name"] for s in of_kind(overlay, "Service") if s["spec"].get("clusterIP") == "None"]
    assert headless == [pservers["spec"]["serviceName"]]


@every_overlay
def test_the_network_is_closed_but_for_what_a_cluster_needs(overlay: str) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(overlay, "NetworkPolicy")}
    assert policies["deny-by-default"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    [port] = {port["port"] for rule in policies["dns"]["egress"] for port in rule["ports"]}
    assert port == 53
    served = {s["spec"]["ports"][0]["port"] for s in of_kind(overlay, "Service")}
    for rules in (policies["cluster"]["ingress"], policies["cluster"]["egress"]):
        assert {port["port"] for rule in rules for port in rule["ports"]} == served


@every_overlay
def test_pservers_are_disturbed_one_at_a_time_and_keep_their_disks(overlay: str) -> None:
    [budget] = of_kind(overlay, "PodDisruptionBudget")
    [pservers] = of_kind(overlay, "StatefulSet")
    assert budget["spec"]["maxUnavailable"] == 1
    assert (
        budget["spec"]["selector"]["matchLabels"].items() <= pservers["spec"]["template"]["metadata"]["labels"].items()
    )
    [claim] = pservers["spec"]["volumeClaimTemplates"]
    [container] = pservers["spec"]["template"]["spec"]["containers"]
    assert claim["metadata"]["name"] in {mount["name"] for mount in container["volumeMounts"]}


@every_overlay
def test_who_is_many_is_spread(overlay: str) -> None:
    for name, pod in pods(overlay):
        if name != "coordinator":
            [spread] = pod["spec"]["topologySpreadConstraints"]
            assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert render(overlay)
