"""Security, resources, probes, volumes and updates of every overlay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ps_config.environment import check_environment
from services.coordinator.settings import CoordinatorSettings
from services.pserver.registration import GOODBYE_SECONDS, LAST_CHECKPOINT_SECONDS
from services.pserver.settings import PserverSettings
from services.runtime.security import TOKEN_WAIT_SECONDS
from services.runtime.server import GRACE_SECONDS
from trainer_client.client.settings import TrainerSettings

from .rendering import KUBERNETES, OVERLAYS, Object, environment, of_kind, pods, render, variables
from .test_network import FIELDS, certificates

SERVICES: dict[str, Any] = {"coordinator": CoordinatorSettings, "pserver": PserverSettings}
STATE, TOKENS, TLS = (f"/var/lib/gradpost/{name}" for name in ("state", "tokens", "tls"))

every_pod = pytest.mark.parametrize(
    ("overlay", "name", "pod"),
    [pytest.param(o, name, pod, id=f"{o} {name}") for o in OVERLAYS for name, pod in pods(o)],
)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def environment_of(overlay: str, pod: Object) -> dict[str, str]:
    return environment(of_kind(overlay, "ConfigMap"), pod, FIELDS)


def mounts(pod: Object) -> dict[str, Object]:
    """Return the volume at each path."""
    [container] = pod["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    return {one["mountPath"]: volumes.get(one["name"], {"claim": one["name"]}) for one in container["volumeMounts"]}


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
WIDENING = {"hostNetwork", "hostPID", "hostIPC", "hostAliases", "ephemeralContainers"}


def pick(value: Object, like: Object) -> Object:
    """Return the members that `like` has, too."""
    return {key: value.get(key) for key in like}


@every_pod
def test_pod_security_is_restricted(overlay: str, name: str, pod: Object) -> None:
    spec = pod["spec"]
    assert pick(spec, API_ACCESS) == API_ACCESS
    assert pick(spec["securityContext"], POD_SECURITY) == POD_SECURITY
    assert not WIDENING & spec.keys()
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"] == CONTAINER_SECURITY
        assert not any("hostPort" in port for port in container["ports"])
    kinds = {"secret", "emptyDir", "persistentVolumeClaim", "configMap"}
    assert all(volume.keys() & kinds for volume in spec["volumes"])


@every_pod
def test_every_container_requests_its_resources(overlay: str, name: str, pod: Object) -> None:
    [container] = pod["spec"]["containers"]
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume)
    assert re.fullmatch(r"gradpost:(cpu|cuda)", container["image"])


@every_pod
def test_tokens_and_keys_are_files_of_secrets_by_name(overlay: str, name: str, pod: Object) -> None:
    [container] = pod["spec"]["containers"]
    assert all("secretKeyRef" not in str(value) for value in variables(of_kind(overlay, "ConfigMap"), pod).values())
    assert "secretRef" not in str(container["envFrom"])
    assert not {"--insecure", "--token"} & {*container["args"]}
    for volume in pod["spec"]["volumes"]:
        assert volume.get("secret", {"defaultMode": 0o400})["defaultMode"] == 0o400
        assert not volume.get("secret", {}).get("optional", False)
    there = mounts(pod)
    tokens = there[TOKENS]["secret"]
    assert tokens["secretName"] == "gradpost-tokens"
    given = {item["key"] for item in tokens.get("items", [])}
    assert given == ({"train"} if name == "trainer" else set())  # services need all
    if certificates(overlay):
        assert there[TLS]["secret"]["secretName"] == f"{name}-tls"
        assert f"{name}-tls" in certificates(overlay)
    read_only = {one["mountPath"] for one in container["volumeMounts"] if one.get("readOnly")}
    assert {path for path, volume in there.items() if "secret" in volume} == read_only


@every_pod
def test_settings_are_valid_and_refer_to_mounted_files(
    overlay: str, name: str, pod: Object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ = environment_of(overlay, pod)
    check_environment(environ)
    assert "GRADPOST_INSECURE" not in environ
    paths = {key: value for key, value in environ.items() if value.startswith("/")}
    for path in paths.values():
        assert path in (STATE, TOKENS) or path.rpartition("/")[0] in mounts(pod)
        if path.startswith(TLS):
            assert path.removeprefix(f"{TLS}/") in ("tls.crt", "tls.key", "ca.crt")  # as cert-manager calls them
    for key, value in environ.items():
        if value.startswith(TLS):
            value = str(tmp_path / value.rpartition("/")[2])
            Path(value).touch()
        monkeypatch.setenv(key, value)
    settings = SERVICES.get(name, TrainerSettings)()
    assert str(settings.tokens_dir) == TOKENS
    [container] = pod["spec"]["containers"]
    [port] = container["ports"]
    if name == "trainer":
        assert (settings.metrics_port, settings.metrics_host) == (port["containerPort"], "0.0.0.0")
        assert (settings.rank, settings.world_size, str(settings.token_file)) == (1, 2, f"{TOKENS}/train")
    else:
        assert container["args"] == ["gradpost", "serve", name]
        assert (settings.port, settings.host) == (port["containerPort"], "0.0.0.0")
        assert str(settings.state_dir) == STATE
        assert mounts(pod)[STATE].keys() & {"persistentVolumeClaim", "claim"}


@every_pod
def test_services_are_probed_and_trainers_are_not(overlay: str, name: str, pod: Object) -> None:
    [container] = pod["spec"]["containers"]
    probes = {key: value for key, value in container.items() if key.endswith("Probe")}
    if name == "trainer":
        assert not probes  # a trainer that waits is alive
        return
    [port] = container["ports"]
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert probes.keys() == paths.keys()
    for kind, path in paths.items():
        if certificates(overlay):  # a kubelet has no certificate
            url = f"https://localhost:{port['containerPort']}{path}"
            assert probes[kind]["exec"]["command"] == ["python3", "-P", "-m", "services.runtime.probe", url]
        else:
            assert probes[kind]["httpGet"] == {"path": path, "port": port["name"]}
        assert probes[kind]["timeoutSeconds"] >= 5
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > TOKEN_WAIT_SECONDS + 30


@every_pod
def test_there_is_time_to_stop(overlay: str, name: str, pod: Object) -> None:
    grace = GRACE_SECONDS + 1
    needed = {"pserver": grace + LAST_CHECKPOINT_SECONDS + GOODBYE_SECONDS, "coordinator": grace, "trainer": 0}[name]
    assert pod["spec"]["terminationGracePeriodSeconds"] > needed + 10
    assert pod["spec"].get("shareProcessNamespace", False) is (name == "trainer")  # SIGTERM does not end process 1


# ---------------------------------------------------------------------- every overlay


@every_overlay
def test_the_namespace_enforces_pod_security(overlay: str) -> None:
    [namespace] = of_kind(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@every_overlay
def test_overlays_contain_no_secrets(overlay: str) -> None:
    assert not of_kind(overlay, "Secret")
    assert not re.search(r"BEGIN [A-Z ]*PRIVATE KEY|BEGIN CERTIFICATE", str(render(overlay)))


def test_rendering_reads_manifests_only() -> None:
    for path in KUBERNETES.rglob("*"):
        assert path.is_dir() or path.suffix == ".yaml", path
        if path.name == "kustomization.yaml":
            assert not re.search(r"Generator|https?://github|^helm", path.read_text(), re.MULTILINE)


@every_overlay
def test_numbers_agree(overlay: str) -> None:
    [settings] = of_kind(overlay, "ConfigMap")
    [pservers] = of_kind(overlay, "StatefulSet")
    num_standbys = int(settings["data"].get("GRADPOST_STANDBYS", "0"))  # of each pserver
    assert pservers["spec"]["replicas"] == int(settings["data"]["GRADPOST_NUM_PSERVERS"]) * (1 + num_standbys)
    wanted = settings["data"]["GRADPOST_NUM_TRAINERS"]
    assert {one["spec"]["trainer"]["numNodes"] for one in of_kind(overlay, "TrainJob")} <= {int(wanted)}
    assert {one["spec"]["mlPolicy"]["numNodes"] for one in of_kind(overlay, "TrainingRuntime")} <= {int(wanted)}
    for job in of_kind(overlay, "Job"):
        assert {job["spec"]["completions"], job["spec"]["parallelism"]} == {int(wanted)}
    [pod] = [pod for name, pod in pods(overlay) if name == "trainer"]
    environ = environment_of(overlay, pod)
    assert environ.get("WORLD_SIZE", environ.get("PET_NNODES")) == wanted


def test_an_overlay_has_standbys_and_the_base_has_none() -> None:
    for overlay, number in (("base", None), ("overlays/gpu-trainers", "1")):
        [settings] = of_kind(overlay, "ConfigMap")
        assert settings["data"].get("GRADPOST_STANDBYS") == number


JOB = {"completionMode": "Indexed", "podReplacementPolicy": "Failed", "backoffLimit": 20}
# The members of each object, of its spec if it has one.
RULES: dict[str, Object] = {
    "ServiceAccount": {"automountServiceAccountToken": False},
    "Deployment": {"replicas": 1, "strategy": {"type": "Recreate"}},  # one coordinator at a time has its volume
    "StatefulSet": {
        "podManagementPolicy": "Parallel",  # pservers are not ready one by one
        "persistentVolumeClaimRetentionPolicy": None,  # the default is to retain
    },
    "PodDisruptionBudget": {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"},
    "Job": JOB,  # a rank has one pod at a time, which is restarted
}


@every_overlay
def test_pods_are_replaced_one_at_a_time(overlay: str) -> None:
    for kind, rules in RULES.items():
        for one in of_kind(overlay, kind):
            assert pick(one.get("spec", one), rules) == rules
    jobs = [job["spec"] for job in of_kind(overlay, "Job")] + [
        {**one["template"]["spec"], "completionMode": "Indexed"}  # JobSet's default
        for runtime in of_kind(overlay, "TrainingRuntime")
        for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]
    ]
    assert [(pick(job, JOB), job["template"]["spec"]["restartPolicy"]) for job in jobs] == [(JOB, "OnFailure")]


@every_overlay
def test_services_keep_their_volumes(overlay: str) -> None:
    [coordinator], [pservers] = of_kind(overlay, "Deployment"), of_kind(overlay, "StatefulSet")
    [claim], [template_claim] = of_kind(overlay, "PersistentVolumeClaim"), pservers["spec"]["volumeClaimTemplates"]
    used = mounts(coordinator["spec"]["template"])[STATE]["persistentVolumeClaim"]["claimName"]
    assert used == claim["metadata"]["name"]
    assert mounts(pservers["spec"]["template"])[STATE] == {"claim": template_claim["metadata"]["name"]}
    [budget] = of_kind(overlay, "PodDisruptionBudget")
    labels = pservers["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
