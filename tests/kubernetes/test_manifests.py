"""Every overlay renders objects that are valid, protected, and agree with each other and with the settings."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from kubernetes_validate.utils import all_versions, major_minor, validate

from ps_config.environment import check_environment
from services.coordinator.settings import CoordinatorSettings
from services.pserver.registration import GOODBYE_SECONDS, LAST_CHECKPOINT_SECONDS
from services.pserver.settings import PserverSettings
from services.runtime.security import TOKEN_WAIT_SECONDS
from services.runtime.server import GRACE_SECONDS
from trainer_client.client.settings import TrainerSettings

from ..soaking import parametrize_sampled
from .rendering import CORE_GROUPS, OVERLAYS, Object, environment, of_kind, pods, render

OLDEST = 29  # 1.29
VERSIONS = sorted({major_minor(version) for version in all_versions() if int(version.split(".")[1]) >= OLDEST})
KUBEFLOW = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}
NAMESPACE = "gradpost"
STATE, TOKENS, TLS = (f"/var/lib/gradpost/{name}" for name in ("state", "tokens", "tls"))
FIELDS = {
    "metadata.name": "pserver-1",
    "metadata.namespace": NAMESPACE,
    "metadata.labels['apps.kubernetes.io/pod-index']": "1",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "1",
}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
every_pod = pytest.mark.parametrize(
    ("overlay", "name", "pod"),
    [pytest.param(o, name, pod, id=f"{o} {name}") for o in OVERLAYS for name, pod in pods(o)],
)


def environment_of(overlay: str, pod: Object) -> dict[str, str]:
    return environment(of_kind(overlay, "ConfigMap"), pod, FIELDS)


def certificates(overlay: str) -> dict[str, list[str]]:
    """Return the DNS names of each certificate, by its Secret."""
    found = of_kind(overlay, "Certificate")
    return {one["spec"]["secretName"]: one["spec"].get("dnsNames", []) for one in found}


def scheme_of(overlay: str) -> str:
    return "https" if certificates(overlay) else "http"


def mounts(pod: Object) -> dict[str, Object]:
    """Return the volume at each path."""
    [container] = pod["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    return {one["mountPath"]: volumes.get(one["name"], {"claim": one["name"]}) for one in container["volumeMounts"]}


def pick(value: Object, like: Object) -> Object:
    """Return the members that `like` has, too."""
    return {key: value.get(key) for key in like}


# ---------------------------------------------------------------------- schemas


@parametrize_sampled("version", VERSIONS, [VERSIONS[0], VERSIONS[-1]])
def test_every_object_fits_its_schema(version: str) -> None:
    [runtime] = of_kind("examples", "TrainingRuntime")
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    objects = [one for overlay in OVERLAYS for one in render(overlay) if one["apiVersion"] in CORE_GROUPS]
    objects.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **job["template"]})
    for text in {json.dumps(one) for one in objects}:
        validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize("kind", KUBEFLOW)
def test_the_train_job_fits_kubeflows_models(kind: str) -> None:
    """Kubeflow's models drop unknown members, so equality shows that all are known and valid."""
    [one] = of_kind("examples", kind)
    parsed = KUBEFLOW[kind].from_dict(one)
    assert parsed is not None
    assert parsed.to_dict() == one


@every_overlay
def test_everything_is_in_a_namespace_that_enforces_pod_security_and_holds_no_secret(overlay: str) -> None:
    [namespace] = of_kind(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [one for one in render(overlay) if one is not namespace]
    assert {one["metadata"]["namespace"] for one in others} == {namespace["metadata"]["name"]} == {NAMESPACE}
    assert not of_kind(overlay, "Secret")
    assert not re.search(r"BEGIN [A-Z ]*PRIVATE KEY|BEGIN CERTIFICATE", str(others))


# ---------------------------------------------------------------------- every pod


# https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
POD_SECURITY = {
    "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,  # the image's
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
API_ACCESS = {
    "serviceAccountName": "gradpost", "automountServiceAccountToken": False,
    "enableServiceLinks": False,  # a service `gradpost-x` would set GRADPOST_X_PORT
}  # fmt: skip
WIDENING = {"hostNetwork", "hostPID", "hostIPC", "hostAliases", "ephemeralContainers", "initContainers"}
VOLUMES = {"secret", "emptyDir", "persistentVolumeClaim", "configMap"}


@every_pod
def test_pods_are_restricted_and_bounded(overlay: str, name: str, pod: Object) -> None:
    spec = pod["spec"]
    [container] = spec["containers"]
    assert pick(spec, API_ACCESS) == API_ACCESS
    assert pick(spec["securityContext"], POD_SECURITY) == POD_SECURITY
    assert container["securityContext"] == CONTAINER_SECURITY
    assert not WIDENING & spec.keys()
    assert not any("hostPort" in port for port in container["ports"])
    assert all(volume.keys() & VOLUMES for volume in spec["volumes"])
    assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume)
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    assert re.fullmatch(r"gradpost:(cpu|cuda)", container["image"])


@every_pod
def test_tokens_and_keys_are_files_of_secrets_by_name(overlay: str, name: str, pod: Object) -> None:
    [container] = pod["spec"]["containers"]
    assert not re.search("secretKeyRef|secretRef|--insecure|--token", str(container))
    secrets = {path: volume["secret"] for path, volume in mounts(pod).items() if "secret" in volume}
    assert {(secret["defaultMode"], secret.get("optional", False)) for secret in secrets.values()} == {(0o400, False)}
    assert secrets[TOKENS]["secretName"] == "gradpost-tokens"
    given = {item["key"] for item in secrets[TOKENS].get("items", [])}
    assert given == ({"train"} if name == "trainer" else set())  # services need all
    if certificates(overlay):
        assert secrets[TLS]["secretName"] == f"{name}-tls"
        assert f"{name}-tls" in certificates(overlay)
    assert {one["mountPath"] for one in container["volumeMounts"] if one.get("readOnly")} == secrets.keys()


@every_pod
def test_settings_are_valid_and_refer_to_mounted_files(
    overlay: str, name: str, pod: Object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ = environment_of(overlay, pod)
    check_environment(environ)
    assert "GRADPOST_INSECURE" not in environ
    for key, value in environ.items():
        folder = value.rpartition("/")[0]
        assert not folder or value in (STATE, TOKENS) or folder in mounts(pod) or "://" in value, key
        if value.startswith(TLS):
            assert value.removeprefix(f"{TLS}/") in ("tls.crt", "tls.key", "ca.crt")  # as cert-manager calls them
            value = str(tmp_path / value.rpartition("/")[2])
            Path(value).touch()
        monkeypatch.setenv(key, value)
    [container] = pod["spec"]["containers"]
    [port] = container["ports"]
    if name == "trainer":
        trainer = TrainerSettings()
        assert (trainer.metrics_port, trainer.metrics_host) == (port["containerPort"], "0.0.0.0")
        assert (trainer.rank, trainer.world_size, str(trainer.token_file)) == (1, 2, f"{TOKENS}/train")
        return
    settings = CoordinatorSettings() if name == "coordinator" else PserverSettings()
    assert container["args"] == ["gradpost", "serve", name]
    assert (settings.port, settings.host) == (port["containerPort"], "0.0.0.0")
    assert (str(settings.state_dir), str(settings.tokens_dir)) == (STATE, TOKENS)


@every_pod
def test_services_are_probed_and_trainers_are_not(overlay: str, name: str, pod: Object) -> None:
    [container] = pod["spec"]["containers"]
    probes = {key: value for key, value in container.items() if key.endswith("Probe")}
    if name == "trainer":
        assert not probes  # a trainer that waits is alive
        return
    [port] = container["ports"]
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    actions: dict[str, Object] = {kind: {"httpGet": {"path": path, "port": "http"}} for kind, path in paths.items()}
    if certificates(overlay):  # a kubelet has no certificate
        url = f"https://localhost:{port['containerPort']}"
        command = ["python3", "-P", "-m", "services.runtime.probe"]
        actions = {kind: {"exec": {"command": [*command, url + path]}} for kind, path in paths.items()}
    assert {kind: pick(probe, actions[kind]) for kind, probe in probes.items()} == actions
    assert all(probe["timeoutSeconds"] >= 5 for probe in probes.values())
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > TOKEN_WAIT_SECONDS + 30


@every_pod
def test_there_is_time_to_stop(overlay: str, name: str, pod: Object) -> None:
    grace = GRACE_SECONDS + 1
    needed = {"pserver": grace + LAST_CHECKPOINT_SECONDS + GOODBYE_SECONDS, "coordinator": grace, "trainer": 0}[name]
    assert pod["spec"]["terminationGracePeriodSeconds"] > needed + 10
    assert pod["spec"].get("shareProcessNamespace", False) is (name == "trainer")  # SIGTERM does not end process 1


# ---------------------------------------------------------------------- numbers, updates and volumes


@every_overlay
def test_numbers_agree(overlay: str) -> None:
    [settings], [pservers] = of_kind(overlay, "ConfigMap"), of_kind(overlay, "StatefulSet")
    num_standbys = int(settings["data"].get("GRADPOST_STANDBYS", "0"))  # of each pserver
    assert num_standbys == (overlay == "overlays/gpu-trainers")
    assert pservers["spec"]["replicas"] == int(settings["data"]["GRADPOST_NUM_PSERVERS"]) * (1 + num_standbys)
    found = {one["spec"]["trainer"]["numNodes"] for one in of_kind(overlay, "TrainJob")}
    found |= {one["spec"]["mlPolicy"]["numNodes"] for one in of_kind(overlay, "TrainingRuntime")}
    found |= {job["spec"][key] for job in of_kind(overlay, "Job") for key in ("completions", "parallelism")}
    [pod] = [pod for name, pod in pods(overlay) if name == "trainer"]
    environ = environment_of(overlay, pod)
    found.add(int(environ.get("WORLD_SIZE", environ.get("PET_NNODES", ""))))
    assert found == {int(settings["data"]["GRADPOST_NUM_TRAINERS"])}


# ---------------------------------------------------------------------- connections


CALLS = [("pserver", "coordinator"), ("trainer", "coordinator"), ("coordinator", "pserver"), ("trainer", "pserver")]
PORTS = {"coordinator": 7070, "pserver": 7071, "trainer": 9000}
DENIED = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def names_of(peer: Object) -> list[str]:
    """Return the roles that a selector of pods matches; of other namespaces the name of the namespace."""
    if "namespaceSelector" in peer:
        return list(peer["namespaceSelector"]["matchLabels"].values())
    labels = {key: [value] for key, value in peer["podSelector"].get("matchLabels", {}).items()}
    labels |= {one["key"]: one["values"] for one in peer["podSelector"].get("matchExpressions", [])}
    assert labels.pop("app.kubernetes.io/name") == [NAMESPACE]
    return labels.get("app.kubernetes.io/component", list(PORTS))


def connections(overlay: str) -> Iterator[tuple[str, str, int | str]]:
    """Yield source, target and port of each rule of the roles' policies."""
    for policy in of_kind(overlay, "NetworkPolicy"):
        spec = policy["spec"]
        for own in names_of(spec) if spec["podSelector"] else ():
            for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
                for peer in rule.get("from", rule.get("to", [])):
                    for other in names_of(peer):
                        ends = (other, own) if "from" in rule else (own, other)
                        yield from ((*ends, port["port"]) for port in rule["ports"])


@every_overlay
def test_only_the_connections_of_a_cluster_are_allowed(overlay: str) -> None:
    """Each of them is in a policy of its source and in one of its target."""
    [settings] = of_kind(overlay, "ConfigMap")
    calls = CALLS + [("pserver", "pserver")] * ("GRADPOST_STANDBYS" in settings["data"])
    expected = Counter[tuple[str, str, int | str]]({(*call, PORTS[call[1]]): 2 for call in calls})
    if of_kind(overlay, "ServiceMonitor"):
        expected.update(("monitoring", role, port) for role in PORTS for port in ("http", "metrics"))
    assert Counter(connections(overlay)) == expected
    [denied, dns] = [o["spec"] for o in of_kind(overlay, "NetworkPolicy") if not o["spec"]["podSelector"]]
    assert denied == DENIED
    [rule] = dns["egress"]
    assert (dns["policyTypes"], [names_of(peer) for peer in rule["to"]]) == (["Egress"], [["kube-system"]])
    assert {port["port"] for port in rule["ports"]} == {53}


@every_overlay
def test_services_find_their_pods_and_name_their_protocol(overlay: str) -> None:
    of_role = dict(pods(overlay))
    for service in of_kind(overlay, "Service"):
        pod = of_role[service["metadata"]["name"]]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        [port], [served] = service["spec"]["ports"], pod["spec"]["containers"][0]["ports"]
        assert (port["targetPort"], port["port"]) == (served["name"], served["containerPort"])
        # With TLS the handshake selects HTTP/2; without it the protocol must be known.
        assert port["appProtocol"] == {"http": "kubernetes.io/h2c", "https": "https"}[scheme_of(overlay)]
    [pservers] = of_kind(overlay, "StatefulSet")
    [headless] = [one for one in of_kind(overlay, "Service") if one["spec"].get("clusterIP") == "None"]
    assert headless["metadata"]["name"] == pservers["spec"]["serviceName"]
    assert headless["spec"]["publishNotReadyAddresses"] is True  # its run is installed before it is ready


@every_overlay
def test_addresses_are_service_names_with_certificates(overlay: str) -> None:
    scheme, names = scheme_of(overlay), certificates(overlay)
    environs = {name: environment_of(overlay, pod) for name, pod in pods(overlay)}
    assert "$(" not in str(environs)
    assert {environ["GRADPOST_COORDINATOR"] for environ in environs.values()} == {f"{scheme}://coordinator:7070"}
    hosts = ",".join(f"coordinator.{NAMESPACE}{suffix}" for suffix in ("", ".svc", ".svc.cluster.local"))
    assert environs["coordinator"]["GRADPOST_ALLOWED_HOSTS"] == hosts
    own = [environs[name].get("GRADPOST_ADVERTISE_ADDRESS") for name in ("coordinator", "pserver", "trainer")]
    if not names:
        assert own == [None] * 3  # by default that of the pod, which would be in no certificate
        return
    named = urlsplit(own[1])
    assert (own[::2], named.scheme, named.netloc) == ([None, None], "https", "pserver-1.pserver.gradpost.svc:7071")
    assert {"coordinator", "localhost"} <= set(names["coordinator-tls"])
    # OpenSSL accepts a wildcard only before two labels.
    assert {"*.pserver.gradpost.svc", "localhost"} <= set(names["pserver-tls"])
