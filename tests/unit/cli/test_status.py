"""`gradpost status` and `gradpost doctor`."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from gradpost import doctor, runs
from gradpost.doctor import check_all
from ps_config.environment import PREFIX
from ps_protocol.errors import TrainerLost
from ps_protocol.fields import ScriptInfo
from ps_protocol.messages import (
    ClusterStatus,
    PserverHeartbeat,
    PserverState,
    PserverStatus,
    TrainerHeartbeat,
    TrainerStatus,
)
from ps_protocol.routes import STATE as STATE_ROUTE
from ps_protocol.routes import STATUS
from ps_protocol.standbys import StandbyStatus

from ..protocol.test_access import put
from .conftest import RunCommand, serving

STATE = ClusterStatus(
    at=1e9, run="5f0c", attempt=0, state="failed", mode="sync", num_pservers=2, num_trainers=2,
    waiting_for=("pserver 1", "trainer 0"), failure=TrainerLost("trainer 0 was lost").to_problem(), plan_digest="d",
    num_parameters=3, parameter_bytes=4000, round=1234,
    pservers=(
        PserverStatus(
            index=0, address="http://127.0.0.1:1", heartbeat_age_seconds=0.5,
            heartbeat=PserverHeartbeat(incarnation=1, run="5f0c", round=1234, missing=(0, 1), waiting_seconds=3.25),
        ),
    ),
    trainers=(
        TrainerStatus(
            rank=1, state="declared", heartbeat_age_seconds=0.25, metrics_address=None,
            heartbeat=TrainerHeartbeat(
                run="5f0c", incarnation=1, round=1233, results={"loss": float("nan"), "accuracy": 0.98333}
            ),
        ),
    ),
)  # fmt: skip
ANSWERS = {STATUS: STATE.model_dump_json()}


STANDBY = {
    "protocol": 2,
    "follows": 0,
    "instance": "5f0c" * 8,
    "address": "http://127.0.0.1:2",
    "heartbeat_age_seconds": 0.5,
}
WITH_STANDBYS = STATE.model_copy(
    update={
        "standbys": (
            StandbyStatus(
                **STANDBY, run="5f0c", round=1232, lag_rounds=2, lag_seconds=0.25, role="in_sync"
            ),
            StandbyStatus(**STANDBY),
        ),
        "overrides": ("parameter w is frozen",),
    }
)  # fmt: skip
IN_A_RING = STATE.model_copy(
    update={"state": "training", "failure": None, "waiting_for": (), "num_pservers": 0, "pservers": ()}
)
SCREENS = {
    "pservers": (STATE, """\
run 5f0c: failed, mode sync, round 1,234, 3 parameters, 4,000 bytes
waiting for pserver 1, trainer 0
failed: trainer 0 was lost (trainer_lost)

pserver  address             round  waits for                     heartbeat
0 of 2   http://127.0.0.1:1  1,234  trainer 0, trainer 1 (3.2 s)  0.5 s ago

trainer  state   round  results                    heartbeat
1 of 2   joined  1,233  accuracy 0.9833, loss nan  0.2 s ago

"""),
    "overrides": (WITH_STANDBYS, "parameter w is frozen\n"),
    "standbys": (WITH_STANDBYS, """\
standby of  address             state           round  lag              heartbeat
pserver 0   http://127.0.0.1:2  in sync         1,232  2 rounds, 0.2 s  0.5 s ago
pserver 0   http://127.0.0.1:2  no replica yet      0  0 rounds, 0.0 s  0.5 s ago
"""),
    "a ring": (IN_A_RING, """\
run 5f0c: training, mode sync in a ring, round 1,234, 3 parameters, 4,000 bytes

trainer  state     round  results                    heartbeat
1 of 2   training  1,233  accuracy 0.9833, loss nan  0.2 s ago

"""),
}  # fmt: skip


@pytest.mark.parametrize("name", SCREENS)
def test_status_as_tables(run_command: RunCommand, name: str) -> None:
    state, shown = SCREENS[name]
    with serving({STATUS: state.model_dump_json()}) as url:
        outcome = run_command("status", "--coordinator", url)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert shown in outcome.stdout
    assert not shown.startswith("run ") or shown == outcome.stdout


def test_status_as_json(run_command: RunCommand) -> None:
    with serving(ANSWERS) as url:
        outcome = run_command("status", "--json", "--coordinator", url + "/")
    answer = json.loads(outcome.stdout)
    assert ClusterStatus.model_validate(answer).pservers == STATE.pservers
    assert answer["trainers"][0]["heartbeat"]["results"] == {"loss": "NaN", "accuracy": 0.98333}


def test_the_coordinator_is_named_by_option_variable_or_file(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flag over environment over file."""
    with serving(ANSWERS) as url:
        file = tmp_path / "gradpost.toml"
        file.write_text(f'coordinator = "{url}"')
        monkeypatch.setenv("GRADPOST_SETTINGS_FILE", str(file))
        assert run_command("status").exit_code == 0
        monkeypatch.setenv("GRADPOST_COORDINATOR", "http://127.0.0.1:1")
        assert run_command("status").exit_code == 1
        assert run_command("status", "--coordinator", url).exit_code == 0
        monkeypatch.setenv("GRADPOST_COORDINATOR", url.removeprefix("http://"))
        assert run_command("status").exit_code == 0


def test_the_default_coordinator_may_have_the_run_of_another_user(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    script = ScriptInfo(command="train.py 3", run_name="other", optimizer="SGD")
    heartbeat = STATE.trainers[0].heartbeat.model_copy(update={"script": script})
    state = STATE.model_copy(update={"trainers": (STATE.trainers[0].model_copy(update={"heartbeat": heartbeat}),)})
    with serving({STATUS: state.model_dump_json()}) as url:
        monkeypatch.setattr(runs, "DEFAULT_COORDINATOR", url)
        outcome = run_command("status")
    assert outcome.stdout.startswith("run 5f0c (other): failed, mode sync, round 1,234, 3 parameters, 4,000 bytes\n")
    assert "\ncommand train.py 3\n" in outcome.stdout
    text = "no `gradpost up` of this folder is running; using the coordinator at"
    assert outcome.stderr == f"gradpost: warning: {text} {url}\n"


# ---------------------------------------------------------------------- doctor


@pytest.fixture
def no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DEFAULT_COORDINATOR", "http://127.0.0.1:1")


@pytest.mark.usefixtures("no_default")
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
