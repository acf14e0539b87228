from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from gradpost import doctor, status
from gradpost.doctor import (
    Finding,
    Level,
    check_addresses,
    check_cluster,
    check_coordinator,
    check_settings,
    check_tokens,
)
from ps_config.environment import PREFIX
from ps_config.versions import installed_versions
from ps_protocol.messages import (
    ClusterStatus,
    PserverHeartbeat,
    PserverState,
    PserverStatus,
    TrainerHeartbeat,
    TrainerStatus,
)
from ps_protocol.process_reports import Software
from ps_protocol.routes import STATE as STATE_ROUTE
from ps_protocol.routes import STATUS
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
    outcome = run_command("doctor", "--json")
    answer = json.loads(outcome.stdout)
    assert [(finding["check"], finding["level"]) for finding in answer["checks"]] == [
        ("settings", "ok"), ("tokens", "ok"), ("coordinator", "skipped"), ("versions", "ok"),
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
    for name in ("check_settings", "check_tokens"):
        monkeypatch.setattr(doctor, name, lambda *_: Finding("c", "skipped", "none"))
    monkeypatch.setattr(doctor, "check_cluster", lambda *_: found)
    outcome = run_command("doctor", *options)
    mark = {"warning": "warning", "broken": "BROKEN "}[level]
    assert (outcome.exit_code, outcome.stderr) == (exit_code, "")
    assert outcome.stdout.splitlines() == [
        *["-       c       none"] * 2,
        "ok      a       fine",
        f"{mark} longer  few\\x1b",
        "                or that",
        "                -> do [this]",
        "",
        verdict,
    ]
    answer = json.loads(run_command("doctor", *options, "--json").stdout)
    assert answer["ok"] == (exit_code == 0)
    assert answer["checks"][2] == {"check": "a", "level": "ok", "detail": "fine", "advice": "", "why": ""}


# ---------------------------------------------------------------------- this machine


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({}, "ok", ""),
        ({"GRADPOST_COORDINATR": "x"}, "broken", "did you mean GRADPOST_COORDINATOR?"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "broken", ""),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "ok", ""),
    ],
)
def test_settings(environ: dict[str, str], level: Level, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (check_settings().level, words in check_settings().detail) == (level, True)


@pytest.mark.parametrize(
    ("tokens", "given", "level", "words"),
    [
        ({}, None, "broken", "there is no token file FOLDER/read"),
        ({"read": ("r" * 30, 0o400)}, None, "ok", "FOLDER/read"),
        ({"read": ("r" * 30, 0o644)}, None, "warning", "may be read by others"),
        ({"other": ("short", 0o400)}, "other", "broken", "holds no token"),
    ],
)
def test_tokens(
    tokens: dict[str, tuple[str, int]], given: str | None, level: Level, words: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    assert check_tokens() == Finding("tokens", "ok", "no token is set")
    monkeypatch.setenv("GRADPOST_TOKENS_DIR", str(tmp_path))
    for name, (token, mode) in tokens.items():
        put(tmp_path / name, token, mode)
    finding = check_tokens(given and tmp_path / given)
    assert (finding.level, words.replace("FOLDER", str(tmp_path)) in finding.detail) == (level, True)


# ---------------------------------------------------------------------- the cluster


@pytest.mark.parametrize(
    ("address", "level", "words"),
    [
        (None, "skipped", ""),
        ("http://127.0.0.1:1", "broken", "no answer from http://127.0.0.1:1"),
        ("here", "broken", ""),
        (json.dumps({"info": {"version": str(PROTOCOL_VERSION)}}), "ok", ""),
        (json.dumps({"info": {"version": str(PROTOCOL_VERSION + 1)}}), "broken", ""),
        ("[]", "broken", "did not answer as this version of Gradpost. Check the address, any proxy and the installed "),
    ],
)
def test_coordinator(address: str | None, level: Level, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address in JSON stands for a coordinator that describes its API so."""
    monkeypatch.setattr(status, "DEFAULT_COORDINATOR", "http://127.0.0.1:1")
    with serving({STATUS: STATE.model_dump_json(), "/openapi.json": address or ""}) as url:
        given = url.removeprefix("http://") if address and address[0] in "{[" else address
        finding, found = check_coordinator(given)
    assert (finding.level, found is not None, words in finding.detail) == (level, level == "ok", True), finding


def pserver(
    index: int, address: str = "http://10.0.0.7:7071", software: Software | None = OURS, *, http2: bool = True
) -> PserverStatus:
    return PserverStatus(
        index=index, address=address, http2=http2, heartbeat_age_seconds=0.1,
        heartbeat=PserverHeartbeat(incarnation=1, run="5f0c", round=1, software=software),
    )  # fmt: skip


def trainer(software: Software, state: str = "declared") -> TrainerStatus:
    return TrainerStatus.model_validate(
        {
            "rank": 7, "state": state, "heartbeat_age_seconds": 0.1, "metrics_address": None,
            "heartbeat": TrainerHeartbeat(run="5f0c", incarnation=1, round=1, software=software),
        }
    )  # fmt: skip


def cluster(**changes: object) -> ClusterStatus:
    return STATE.model_copy(update={"software": OURS, "pservers": (), "trainers": (), **changes})


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


STATE_OF_PSERVER = PserverState(index=0, incarnation=1, run=None, round=0)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("PROXY", "PROXY answers, but not over HTTP/2: "),
        ("SILENT", "SILENT cannot be reached from here: no answer within 1 s"),
        ("http://ps-0.invalid:7071", "the name ps-0.invalid is not known here: "),
    ],
)
def test_a_pserver_is_reached(address: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy speaks HTTP/1.1 alone, and the silent pserver accepts connections."""
    monkeypatch.setattr(doctor, "REACH_SECONDS", 1.0 if address == "SILENT" else 30.0)
    answers = {
        "/openapi.json": json.dumps({"info": {"version": str(PROTOCOL_VERSION)}}),
        STATE_ROUTE: STATE_OF_PSERVER.model_dump_json(),
    }
    with serving(answers) as url, socket.create_server(("127.0.0.1", 0)) as silent:
        places = {"PROXY": url, "SILENT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        answers[STATUS] = cluster(pservers=(pserver(0, places.get(address, address)),)).model_dump_json()
        found = {finding.check: finding for finding in check_cluster(url)}
    assert found["pserver 0"].level == "broken"
    assert words.replace(address, places.get(address, address)) in found["pserver 0"].detail
