"""The rules of docker-compose.yml and the Dockerfile, without starting containers."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from ps_config.environment import KNOWN_VARIABLES

from .conftest import ROOT

COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
FILE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
BUILT = {service["image"]: service["build"] for service in SERVICES.values() if "build" in service}


def stages() -> dict[str, str]:
    """Return the stages of the Dockerfile, by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)\n", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_it_fits_the_specification() -> None:
    """The specification is that of Docker Compose v2."""
    command = [sys.executable, "-P", "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


CONFINED = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "init": True}
WIDENING = {"cap_add", "privileged", "devices", "pid", "ipc", "userns_mode", "group_add", "volumes_from", "env_file"}


@pytest.mark.parametrize("name", SERVICES)
def test_services_have_no_privileges_and_no_secrets(name: str) -> None:
    service = SERVICES[name]
    assert CONFINED.items() <= service.items()
    assert not WIDENING & service.keys()
    assert service.get("network_mode", "none") == "none"
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in service.get("ports", []))
    if name != "tokens":  # the only writer of tokens
        assert all(volume.endswith(":ro") for volume in service.get("volumes", []) if volume.startswith("tokens:"))
    if service["image"] in {"gradpost", *BUILT}:
        assert "user" not in service
        assert "USER gradpost\n" in stages()[BUILT[service["image"]]["target"]]
    else:
        assert re.match(r"[1-9]", service["user"])
    environment = service.get("environment", {})
    assert environment.keys() <= KNOWN_VARIABLES
    assert not [key for key in environment if re.search("TOKEN|SECRET|PASSWORD|KEY|INSECURE", key)]


def test_whatever_is_mounted_is_there() -> None:
    mounts = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", [])]
    folders = [mount for mount in mounts if mount[0].startswith(".")]
    assert folders
    for source, _, mode in folders:
        assert (ROOT / source).exists()
        assert mode == "ro"
    assert {mount[0] for mount in mounts} - {mount[0] for mount in folders} == FILE["volumes"].keys()


def test_nothing_that_is_shipped_opens_a_cluster() -> None:
    files = [COMPOSE, *(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
    assert [path for path in files if "insecure" in path.read_text().lower()] == []


@pytest.mark.parametrize("name", ["trainer", "gpu-trainer"])
def test_a_run_waits_for_as_many_trainers_as_are_started(name: str) -> None:
    assert SERVICES[name]["scale"] == SERVICES["coordinator"]["environment"]["GRADPOST_NUM_TRAINERS"]


def test_each_pserver_has_a_standby_that_may_become_it() -> None:
    indices = range(SERVICES["coordinator"]["environment"]["GRADPOST_NUM_PSERVERS"])
    assert SERVICES["coordinator"]["environment"]["GRADPOST_DURABILITY"] == "replicated"
    for index in indices:
        pserver, standby = dict(SERVICES[f"pserver-{index}"]), dict(SERVICES[f"standby-{index}"])
        assert standby.pop("profiles") == ["standby"]
        expected = dict(pserver.pop("environment"))
        expected["GRADPOST_FOLLOW"] = expected.pop("GRADPOST_PSERVER_INDEX")
        assert standby.pop("environment") == expected
        assert standby == pserver
    assert not [name for name in SERVICES if name.startswith("standby-") and int(name[8:]) not in indices]
