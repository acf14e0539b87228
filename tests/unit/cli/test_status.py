from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ps_protocol.errors import TrainerLost
from ps_protocol.messages import ClusterStatus, PserverStatus, TrainerStatus
from ps_protocol.routes import STATUS
from ps_protocol.standbys import StandbyStatus

from .conftest import RunCommand, serving

STATE = ClusterStatus(
    run="5f0c", state="failed", mode="sync", num_pservers=2, num_trainers=2, waiting_for=("pserver 1", "trainer 0"),
    failure=TrainerLost("trainer 0 was lost").to_problem(), plan_digest="d", num_parameters=3, parameter_bytes=4000,
    round=1234,
    pservers=(
        PserverStatus(
            index=0, address="http://127.0.0.1:1", incarnation=1, round=1234, missing=(0, 1), waiting_seconds=3.25,
            heartbeat_age_seconds=0.5,
        ),
    ),
    trainers=(
        TrainerStatus(
            rank=1, incarnation=1, round=1233, state="declared", heartbeat_age_seconds=0.25, metrics_address=None,
            results={"loss": float("nan"), "accuracy": 0.98333},
        ),
    ),
)  # fmt: skip
ANSWERS = {STATUS: STATE.model_dump_json()}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADPOST_COORDINATOR", "GRADPOST_SETTINGS_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_status_as_tables(run_command: RunCommand) -> None:
    with serving(ANSWERS) as url:
        outcome = run_command("status", "--coordinator", url)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout == (
        "run 5f0c: failed, mode sync, round 1,234, 3 parameters, 4,000 bytes\n"
        "waiting for pserver 1, trainer 0\n"
        "failed: trainer 0 was lost (trainer_lost)\n"
        "\n"
        "pserver  address             round  waits for                     heartbeat\n"
        "0 of 2   http://127.0.0.1:1  1,234  trainer 0, trainer 1 (3.2 s)  0.5 s ago\n"
        "\n"
        "trainer  state   round  results                    heartbeat\n"
        "1 of 2   joined  1,233  accuracy 0.9833, loss nan  0.2 s ago\n"
        "\n"
    )


def test_status_with_standbys(run_command: RunCommand) -> None:
    values = {"follows": 0, "instance": "5f0c" * 8, "address": "http://127.0.0.1:2", "heartbeat_age_seconds": 0.5}
    standbys = (
        StandbyStatus(**values, run="5f0c", round=1232, lag_rounds=2, lag_bytes=8192, lag_seconds=0.25, role="in_sync"),
        StandbyStatus(**values),
    )
    with serving({STATUS: STATE.model_copy(update={"standbys": standbys}).model_dump_json()}) as url:
        outcome = run_command("status", "--coordinator", url)
    assert (
        "standby of  address             state      round  lag                           heartbeat\n"
        "pserver 0   http://127.0.0.1:2  in sync    1,232  2 rounds, 8,192 bytes, 0.2 s  0.5 s ago\n"
        "pserver 0   http://127.0.0.1:2  following      0  no replica yet                0.5 s ago\n"
    ) in outcome.stdout


def test_status_of_a_ring(run_command: RunCommand) -> None:
    trainers = [
        STATE.trainers[0].model_copy(update={"rank": rank, "results": {}, **place})
        for rank, place in enumerate([{"waiting_seconds": 3.25}, {}, {"is_done": True, "waiting_seconds": 9.0}])
    ]
    changes = {"state": "training", "failure": None, "waiting_for": (), "num_pservers": 0, "pservers": ()}
    ring = STATE.model_copy(update={**changes, "num_trainers": 3, "trainers": tuple(trainers)})
    with serving({STATUS: ring.model_dump_json()}) as url:
        outcome = run_command("status", "--coordinator", url)
    assert outcome.stdout == (
        "run 5f0c: training, mode sync in a ring, round 1,234, 3 parameters, 4,000 bytes\n"
        "\n"
        "trainer  state     round  in the ring               results  heartbeat\n"
        "0 of 3   training  1,233  waits for others (3.2 s)           0.2 s ago\n"
        "1 of 3   training  1,233  computes                           0.2 s ago\n"
        "2 of 3   training  1,233  no batches left                    0.2 s ago\n"
        "\n"
    )


def test_status_as_json(run_command: RunCommand) -> None:
    with serving(ANSWERS) as url:
        outcome = run_command("status", "--json", "--coordinator", url + "/")
    answer = json.loads(outcome.stdout)
    assert ClusterStatus.model_validate(answer).pservers == STATE.pservers
    assert answer["trainers"][0]["results"] == {"loss": "NaN", "accuracy": 0.98333}


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


def test_a_coordinator_that_does_not_answer_is_named(run_command: RunCommand) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcome = run_command("status", "--coordinator", f"http://127.0.0.1:{port}")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr == (
        f"gradpost: error: no coordinator: no answer from http://127.0.0.1:{port}: [Errno 111] Connection refused. "
        "Give its address with --coordinator or GRADPOST_COORDINATOR\n"
    )


def test_a_port_that_closes_the_connection_may_serve_tls(run_command: RunCommand) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: server.accept()[0].close())
        outcome = run_command("status", "--coordinator", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert "; if it serves TLS, its address begins with https:. Give its address with --coordinator" in outcome.stderr


@pytest.mark.parametrize(
    ("answers", "status", "message"),
    [
        ({}, 200, "answered 404, but not as Gradpost: "),
        ({STATUS: "<html>"}, 502, "answered 502, but not as Gradpost: <html>. Check the address and any proxy"),
        (
            {STATUS: "<html>"},
            200,
            "did not answer as this version of Gradpost. Check the address, any proxy and the installed version",
        ),
        (
            {STATUS: '{"run": "5f0c"}'},
            200,
            "did not answer as this version of Gradpost. Check the address, any proxy and the installed version",
        ),
    ],
)
def test_another_server_is_recognized(
    run_command: RunCommand, answers: dict[str, str], status: int, message: str
) -> None:
    with serving(answers, status) as url:
        outcome = run_command("status", "--coordinator", url)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_an_invalid_address_is_refused(run_command: RunCommand) -> None:
    outcome = run_command("status", "--coordinator", "ftp://x")
    assert outcome.exit_code == 2
    assert (
        "the coordinator's address: expected a base URL such as http://10.0.0.5:7070, got 'ftp://x'" in outcome.stderr
    )


def test_tls_files_that_cannot_be_used_are_one_line(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADPOST_TLS_CA", "nothing.pem")
    outcome = run_command("status")
    message = "gradpost: error: the TLS file nothing.pem cannot be read: No such file or directory\n"
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (2, "", message)
