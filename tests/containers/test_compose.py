"""`docker compose up`, with no preparation, in real containers."""

from __future__ import annotations

import re
import shlex
import time
from typing import Any

import httpx
import pytest

from ..docs.markdown import code_blocks, read, section
from .conftest import Compose

pytestmark = [pytest.mark.extended, pytest.mark.alone, pytest.mark.timeout(1800)]

API = "http://127.0.0.1:7070"
PROMETHEUS = "http://127.0.0.1:9090/api/v1/query"
WAIT_SECONDS = 180.0
# The commands of docs/deploy.md without profiles, which need a GPU or another image.
[COMMANDS] = code_blocks(section(read("deploy.md"), "Containers"), "bash")
UP, _, EXEC, DOWN = (shlex.split(line, comments=True) for line in COMMANDS.text.splitlines() if "--profile" not in line)
for command in (UP, EXEC, DOWN):
    del command[:2]  # docker compose
UP.remove("--build")  # the fixture has built them
LAST_LINE = r"(trained: mode=sync transport=HTTP/2 accuracy=0\.9\d+ rounds=\d+) seconds=[\d.]+"


def wait_for_results(compose: Compose, number: int) -> list[str]:
    """Wait for the last lines of so many successful trainers, and return them without their times."""
    until = time.monotonic() + WAIT_SECONDS
    while len(lines := re.findall(LAST_LINE, compose("logs", "trainer"))) < number:
        assert time.monotonic() < until, compose("logs")
        time.sleep(1)  # there is no event but output
    return lines


def token(compose: Compose) -> str:
    exec_, *command = EXEC
    return compose(exec_, "-T", *command).strip()


def status(compose: Compose) -> dict[str, Any]:
    response = httpx.get(f"{API}/v1/status", headers={"authorization": f"Bearer {token(compose)}"})
    return response.raise_for_status().json()  # type: ignore[no-any-return]


def ask_prometheus(query: str) -> list[dict[str, Any]]:
    response = httpx.get(PROMETHEUS, params={"query": query}).raise_for_status()
    return response.json()["data"]["result"]  # type: ignore[no-any-return]


def exit_codes(compose: Compose) -> list[str]:
    """Return the exit codes of the trainers, as `ps` shows them."""
    shown = compose("ps", "-a", check=False) or compose("ps")  # not every tool has -a
    return [code for line in shown.splitlines() if "trainer" in line for code in re.findall(r"Exited \((\d+)\)", line)]


def test_training_finishes_and_its_services_can_be_inspected(compose: Compose) -> None:
    compose(*UP, "-d")
    lines = wait_for_results(compose, 2)
    assert len(set(lines)) == 1, lines  # both print the same
    until = time.monotonic() + 30
    while len(codes := exit_codes(compose)) < 2:  # they end after this line
        assert time.monotonic() < until, compose("ps")
        time.sleep(1)
    assert codes == ["0", "0"]

    found = status(compose)
    assert (found["state"], found["num_trainers"], len(found["pservers"])) == ("finished", 2, 2)
    assert httpx.get(f"{API}/v1/status").status_code == 401

    until = time.monotonic() + 60
    while {one["metric"].get("role") for one in ask_prometheus("up == 1")} != {"coordinator", "pserver"}:
        assert time.monotonic() < until, ask_prometheus("up")
        time.sleep(1)


def test_containers_have_no_privileges(compose: Compose) -> None:
    compose("up", "-d")
    for service in ("coordinator", "pserver-0", "prometheus"):
        assert compose("exec", "-T", service, "id", "-u").strip() == "10001"
        facts = compose("exec", "-T", service, "cat", "/proc/self/status")
        assert re.search(r"CapEff:\s+0+\n", facts), facts
        assert re.search(r"NoNewPrivs:\s+1\n", facts), facts
        for path in ("/anything", "/var/lib/gradpost/tokens/anything"):
            refusal = compose("exec", "-T", service, "sh", "-c", f"touch {path} 2>&1 || true")
            assert "Read-only file system" in refusal, refusal
    assert "gradpost_" not in compose("exec", "-T", "coordinator", "env")  # no token there


def test_a_standby_replaces_a_killed_pserver(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    compose(*DOWN)
    monkeypatch.setenv("COMPOSE_PROFILES", "standby")
    compose("up", "-d")
    headers = {"authorization": f"Bearer {token(compose)}"}
    until = time.monotonic() + WAIT_SECONDS
    while True:
        standbys = httpx.get(f"{API}/v1/status", headers=headers).raise_for_status().json()["standbys"]
        if any(standby["follows"] == 0 and standby["role"] == "in_sync" for standby in standbys):
            break
        assert time.monotonic() < until, compose("logs", "standby-0")
        time.sleep(0.1)
    compose("kill", "pserver-0")
    assert len(set(wait_for_results(compose, 2))) == 1
    found = status(compose)
    assert (found["state"], found["pservers"][0]["heartbeat"]["incarnation"]) == ("finished", 2)
    compose(*DOWN)  # with the profile
