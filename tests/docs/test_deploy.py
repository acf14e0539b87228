"""`docs/deploy.md`: the commands for Kubernetes create all that pods refer to; tests/containers runs the rest."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..kubernetes.rendering import pods
from .markdown import ROOT, examples, read, section
from .stage import run_shell

[SCRIPT] = examples(section(read("deploy.md"), "Kubernetes"), "sh")
PROXIES = section(read("deploy.md"), "Behind proxies")
for language in ("nginx", "haproxy"):  # tests/cluster/test_surroundings.py runs them
    examples(PROXIES, language)

# Print the objects instead of sending them to a cluster.
KUBECTL = """
kubectl() {
  case "$*" in
    *port-forward*) ;;
    apply*) command kubectl kustomize "${@:3}" ;;
    *) command kubectl "$@" --dry-run=client --output yaml ;;
  esac
  echo ---
}
"""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, to render manifests")
def test_the_commands_for_kubernetes_create_the_secret_of_the_pods(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    printed = run_shell(tmp_path, KUBECTL, SCRIPT.text).partition("apiVersion")
    objects: list[dict[str, Any]] = [one for one in yaml.safe_load_all(printed[1] + printed[2]) if one]
    namespace, secret, *_ = objects
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", secret["metadata"]["namespace"])
    volumes = [volume for _, pod in pods("overlays/laptop") for volume in pod["spec"]["volumes"]]
    wanted = [volume["secret"] for volume in volumes if "secret" in volume]
    assert {volume["secretName"] for volume in wanted} == {secret["metadata"]["name"]}
    assert {item["key"] for volume in wanted for item in volume.get("items", [])} <= secret["data"].keys()
    assert {name: base64.b64decode(data) for name, data in secret["data"].items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "tokens").iterdir()
    }
