from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gradpost import connection, doctor
from gradpost.doctor import check_all
from ps_config.environment import PREFIX
from ps_protocol.messages import PserverHeartbeat, PserverState, PserverStatus
from ps_protocol.routes import STATE as STATE_ROUTE
from ps_protocol.routes import STATUS

from ..protocol.test_tokens import put
from .conftest import RunCommand, serving
from .test_status import STATE


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(connection, "DEFAULT_COORDINATOR", "http://127.0.0.1:1")


def test_a_machine_without_faults_passes(run_command: RunCommand) -> None:
    outcome = run_command("doctor", "--json")
    answer = json.loads(outcome.stdout)
    levels = [(finding["check"], finding["level"]) for finding in answer["checks"]]
    assert levels == [("settings", "ok"), ("token", "ok"), ("coordinator", "skipped")]
    assert (answer["ok"], outcome.exit_code) == (True, 0)


@pytest.mark.parametrize(
    ("environ", "options", "exit_code", "line"),
    [
        ({"COORDINATR": "x"}, "", 1, "broken   settings    unknown environment variable GRADPOST_COORDINATR; did you"),
        ({}, "--coordinator http://127.0.0.1:1", 1, "broken   coordinator no coordinator: no answer from http://127.0"),
        ({}, "--token-file absent", 1, "broken   token       there is no token file absent"),
        ({}, "--token-file short", 1, "broken   token       "),
        ({"TOKENS_DIR": "."}, "", 0, "warning  token       "),
        ({"TOKENS_DIR": "."}, "--strict", 1, "warning  token       "),
    ],
)
def test_a_problem_is_a_line_and_a_code(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    environ: dict[str, str], options: str, exit_code: int, line: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    put(Path("read"), "r" * 30, 0o644)
    put(Path("short"), "short", 0o400)
    for name, value in environ.items():
        monkeypatch.setenv(PREFIX + name, value)
    outcome = run_command("doctor", *options.split())
    assert outcome.exit_code == exit_code
    assert any(shown.startswith(line) for shown in outcome.stdout.splitlines()), outcome
    assert outcome.stdout.endswith("failed\n" if exit_code else "all is well\n")


def make_pserver(address: str, **changes: Any) -> PserverStatus:
    heartbeat = PserverHeartbeat(incarnation=1, run="5f0c", round=1)
    return PserverStatus(index=0, address=address, heartbeat_age_seconds=0.1, heartbeat=heartbeat, **changes)


@pytest.mark.parametrize(
    ("address", "http2", "incarnation", "words"),
    [
        ("PROXY", False, 1, ""),
        ("PROXY", True, 1, "PROXY cannot be reached from here over HTTP/2: "),
        ("PROXY", False, 2, "pserver 0 of incarnation 2 answers at PROXY"),
        ("SILENT", True, 1, "SILENT cannot be reached from here over HTTP/2: no response within 1 s"),
        ("http://ps-0.invalid:7071", True, 1, "ps-0.invalid"),
    ],
)
def test_a_pserver_is_reached_as_a_trainer_reaches_it(
    address: str, http2: bool, incarnation: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy speaks HTTP/1.1 alone, and the silent pserver accepts connections."""
    monkeypatch.setattr(doctor, "REACH_SECONDS", 1.0 if address == "SILENT" else 30.0)
    state = PserverState(index=0, incarnation=incarnation, run=None, round=0)
    answers = {STATE_ROUTE: state.model_dump_json()}
    with serving(answers) as url, socket.create_server(("127.0.0.1", 0)) as silent:
        places = {"PROXY": url, "SILENT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        place = places.get(address, address)
        cluster = STATE.model_copy(update={"pservers": (make_pserver(place, http2=http2),), "trainers": ()})
        answers[STATUS] = cluster.model_dump_json()
        *_, found = check_all(url, None)
    assert (found.check, found.level) == ("pserver 0", "broken" if words else "ok"), found
    assert words.replace(address, place) in found.detail
