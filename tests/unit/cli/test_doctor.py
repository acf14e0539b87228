from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradpost import doctor, status
from gradpost.doctor import (
    Finding,
    Level,
    Reached,
    check_addresses,
    check_clocks,
    check_cluster,
    check_coordinator,
    check_disk,
    check_pserver,
    check_pserver_disks,
    check_settings,
    check_tokens,
    check_versions,
)
from ps_config.environment import PREFIX
from ps_config.versions import installed_versions
from ps_protocol.messages import ClusterStatus, PserverState, PserverStatus, TrainerStatus
from ps_protocol.process_reports import Software
from ps_protocol.routes import HEALTH, METRICS, STATUS
from ps_protocol.routes import STATE as STATE_ROUTE
from ps_protocol.vocabulary import PROTOCOL_VERSION

from ..protocol.test_tokens import put
from .conftest import RunCommand, serving
from .test_status import STATE

OURS = Software(**installed_versions())


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


# ---------------------------------------------------------------------- the command


def test_a_machine_without_faults_passes(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "DEFAULT_COORDINATOR", "http://127.0.0.1:1")
    monkeypatch.setattr(doctor, "MIN_FREE_SHARE", 0.0)
    outcome = run_command("doctor", "--json")
    answer = json.loads(outcome.stdout)
    assert [(finding["check"], finding["level"]) for finding in answer["checks"]] == [
        ("settings", "ok"), ("disk", "ok"), ("tokens", "ok"), ("coordinator", "skipped"), ("versions", "ok"),
    ]  # fmt: skip
    assert (answer["ok"], outcome.exit_code) == (True, 0)


@pytest.mark.parametrize(
    ("level", "options", "exit_code", "verdict"),
    [
        ("warning", [], 0, "all is well, with 1 warning"),
        ("warning", ["--strict"], 1, "all is well, with 1 warning"),
        ("broken", [], 1, "1 check failed"),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    level: Level,
    options: list[str],
    exit_code: int,
    verdict: str,
) -> None:
    found = [Finding("a", "ok", "fine"), Finding("longer", level, "few\x1b", "do [this]", "or that")]
    for name in ("check_settings", "check_disk", "check_tokens"):
        monkeypatch.setattr(doctor, name, lambda *_: Finding("c", "skipped", "none"))
    monkeypatch.setattr(doctor, "check_cluster", lambda *_: found)
    outcome = run_command("doctor", *options)
    mark = {"warning": "warning", "broken": "BROKEN "}[level]
    assert (outcome.exit_code, outcome.stderr) == (exit_code, "")
    assert outcome.stdout.splitlines() == [
        *["-       c       none"] * 3,
        "ok      a       fine",
        f"{mark} longer  few\\x1b",
        "                or that",
        "                -> do [this]",
        "",
        verdict,
    ]
    answer = json.loads(run_command("doctor", *options, "--json").stdout)
    assert answer["ok"] == (exit_code == 0)
    assert answer["checks"][3] == {"check": "a", "level": "ok", "detail": "fine", "advice": "", "why": ""}


def test_an_error_in_a_check_does_not_hide_other_findings(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_disk() -> Finding:
        raise ZeroDivisionError("x")

    monkeypatch.setattr(status, "DEFAULT_COORDINATOR", "http://127.0.0.1:1")
    monkeypatch.setattr(doctor, "check_disk", check_disk)
    outcome = run_command("doctor")
    assert outcome.exit_code == 1
    assert "BROKEN  disk         the check raised ZeroDivisionError('x')\n" in outcome.stdout
    assert "\nok      tokens " in outcome.stdout


# ---------------------------------------------------------------------- this machine


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_settings().level == "ok"
    monkeypatch.setenv("GRADPOST_COORDINATR", "x")
    finding = check_settings()
    assert (finding.level, "did you mean GRADPOST_COORDINATOR?" in finding.detail) == ("broken", True)
    monkeypatch.delenv("GRADPOST_COORDINATR")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_settings().level == "broken"
    monkeypatch.setenv("RANK", "1")
    assert check_settings().level == "ok"


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "gradpost.toml"
    file.write_text(f'state_dir = "{tmp_path / "not" / "yet"}"')
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", str(file))
    assert f" are free in {tmp_path}" in check_disk().detail
    monkeypatch.setattr(doctor, "MIN_FREE_SHARE", 1.1)
    assert check_disk().level == "warning"
    file.write_text("=")
    assert check_disk().level == "skipped"


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert check_tokens() == Finding("tokens", "ok", "no token is set")
    monkeypatch.setenv("GRADPOST_TOKENS_DIR", str(tmp_path))
    assert (check_tokens().level, check_tokens().detail) == ("broken", f"there is no token file {tmp_path / 'read'}")
    put(tmp_path / "read", "r" * 30)
    assert check_tokens() == Finding("tokens", "ok", str(tmp_path / "read"))
    (tmp_path / "read").chmod(0o644)
    assert (check_tokens().level, "may be read by others" in check_tokens().detail) == ("warning", True)
    put(tmp_path / "other", "short")
    finding = check_tokens(tmp_path / "other")
    assert (finding.level, "holds no token" in finding.detail) == ("broken", True)
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", "/nowhere.toml")
    monkeypatch.delenv("GRADPOST_TOKENS_DIR")
    assert check_tokens().level == "skipped"  # check_settings names the problem


# ---------------------------------------------------------------------- the cluster


def test_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "DEFAULT_COORDINATOR", "http://127.0.0.1:1")
    finding, found = check_coordinator()
    assert (finding.level, found) == ("skipped", None)
    monkeypatch.setenv("GRADPOST_COORDINATOR", "http://127.0.0.1:1")
    finding, found = check_coordinator()
    assert (finding.level, "no answer from http://127.0.0.1:1" in finding.detail, found) == ("broken", True, None)
    for version, level in ((PROTOCOL_VERSION, "ok"), (PROTOCOL_VERSION + 1, "broken")):
        openapi = json.dumps({"info": {"version": str(version)}})
        with serving({STATUS: STATE.model_dump_json(), "/openapi.json": openapi}) as url:
            finding, found = check_coordinator(url.removeprefix("http://"))
            assert (finding.level, found is not None) == (level, level == "ok")
    with serving({STATUS: STATE.model_dump_json(), "/openapi.json": "[]"}) as url:
        assert check_coordinator(url)[0].detail.endswith(
            "did not answer as this version of Gradpost. Check the address, any proxy and the installed version"
        )
    assert check_coordinator("here")[0].level == "broken"


def pserver(
    index: int, address: str = "http://10.0.0.7:7071", software: Software | None = OURS, *, http2: bool = True
) -> PserverStatus:
    return PserverStatus(
        index=index, address=address, http2=http2, incarnation=1, round=1, missing=(), waiting_seconds=0.0,
        heartbeat_age_seconds=0.1, software=software,
    )  # fmt: skip


def trainer(software: Software, state: str = "declared") -> TrainerStatus:
    return TrainerStatus.model_validate(
        {
            "rank": 7, "incarnation": 1, "round": 1, "state": state, "heartbeat_age_seconds": 0.1,
            "metrics_address": None, "results": {}, "software": software,
        }
    )  # fmt: skip


def cluster(**changes: object) -> ClusterStatus:
    return STATE.model_copy(update={"software": OURS, "pservers": (), "trainers": (), **changes})


def test_versions() -> None:
    assert check_versions().detail.endswith(": the same in 1 installation")
    assert check_versions(cluster(trainers=(trainer(OURS),))).detail.endswith(": the same in 3 installations")
    older = OURS.model_copy(update={"torch": "2.0"})
    pservers = (pserver(0), pserver(1, software=None))
    finding = check_versions(cluster(pservers=pservers, trainers=(trainer(older),)))
    assert finding.level == "warning"
    assert f"torch 2.0 (trainer 7); {OURS.torch} (this machine, coordinator, pserver 0)" in finding.detail
    assert check_versions(cluster(trainers=(trainer(older, "lost"),))).level == "ok"


@pytest.mark.parametrize(
    ("coordinator", "addresses", "levels"),
    [
        ("http://127.0.0.1:7070", ["http://127.0.0.1:1", "http://localhost:2"], ["ok"]),
        ("http://10.0.0.1:7070", ["http://10.0.0.2:1", "http://ps-1.example:1"], ["ok"]),
        ("http://10.0.0.1:7070", ["http://127.0.0.1:1", "http://127.0.0.1:2"], ["broken"]),
        ("http://127.0.0.1:7070", ["http://10.0.0.2:1", "http://[::1]:2"], ["broken"]),
        ("http://10.0.0.1:7070", ["http://10.0.0.2:1", "http://10.0.0.2:1"], ["broken"]),
        ("http://10.0.0.1:7070", [], []),
    ],
)
def test_addresses(coordinator: str, addresses: list[str], levels: list[str]) -> None:
    pservers = [pserver(index, address) for index, address in enumerate(addresses)]
    assert [finding.level for finding in check_addresses(coordinator, pservers)] == levels


STATE_OF_PSERVER = PserverState(
    index=0, incarnation=1, run=None, round=0, members=(), missing=(), waiting_seconds=0, num_blocks=0,
    shard_bytes=0, pushed_bytes=0, pulled_bytes=0, transports=(), digest=None, failure=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("told", "one", "level", "words"),
    [
        (pserver(0), Reached(state=STATE_OF_PSERVER), "ok", "answers over HTTP/2"),
        (pserver(0, http2=False), Reached(state=STATE_OF_PSERVER), "warning", "answers over HTTP/1.1"),
        (pserver(0), Reached(state=STATE_OF_PSERVER, http2_trouble="x"), "broken", "answers, but not over HTTP/2: x"),
        (pserver(1), Reached(state=STATE_OF_PSERVER), "broken", "as pserver 0 of incarnation 1, not as pserver 1"),
        (pserver(0), Reached(trouble="no route"), "broken", "cannot be reached from here: no route"),
    ],
)
def test_a_pserver(told: PserverStatus, one: Reached, level: str, words: str) -> None:
    finding = check_pserver(told, one)
    assert (finding.level, words in finding.detail) == (level, True), finding
    assert (finding.advice == "") == (finding.why == "") == (level == "ok")


def test_a_pserver_behind_a_proxy_of_http1_alone() -> None:
    answers = {
        "/openapi.json": json.dumps({"info": {"version": str(PROTOCOL_VERSION)}}),
        HEALTH: "{}",
        STATE_ROUTE: STATE_OF_PSERVER.model_dump_json(),
        METRICS: "gradpost_disk_size_bytes 1e11\ngradpost_disk_free_bytes 9e9\n",
    }
    with serving(answers) as url:
        answers[STATUS] = cluster(pservers=(pserver(0, url),)).model_dump_json()
        found = {finding.check: finding for finding in check_cluster(url)}
    assert found["pserver 0"].level == "broken"
    assert f"{url} answers, but not over HTTP/2: " in found["pserver 0"].detail
    assert found["pserver disks"].detail == "pserver 0 has 9.0 GB left of 100 GB"
    assert found["clocks"].detail == "2 services and this machine agree, to about a second"


def test_clocks() -> None:
    assert check_clocks({"coordinator": None}).level == "skipped"
    assert check_clocks({"coordinator": 0.4, "pserver 0": None}).level == "ok"
    finding = check_clocks({"coordinator": -90.0, "pserver 1": 7.0})
    assert (finding.level, finding.detail) == (
        "warning", "coordinator is 90 s behind, pserver 1 is 7 s ahead of this machine"
    )  # fmt: skip


def test_pserver_disks() -> None:
    assert check_pserver_disks({}).level == "skipped"
    assert check_pserver_disks({0: (5e10, 1e11)}).level == "ok"
    finding = check_pserver_disks({0: (5e10, 1e11), 1: (9e9, 1e11)})
    assert (finding.level, finding.detail) == ("warning", "pserver 1 has 9.0 GB left of 100 GB")
