"""A change by an administrator applies from the round that the answer names, to the bit; and the commands for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, load_file

from ..unit.cli.conftest import ROOT, Outcome, RunCommand, run_command, run_process  # noqa: F401 - a fixture
from .faulty_run import FaultyRun
from .training import Oracle
from .training_script import make_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROUNDS = 160


class Administrator:
    def __init__(self, run: FaultyRun) -> None:
        self.address = run.cluster.address

    def send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return httpx.request(method, self.address + path, timeout=60, **arguments)

    def ask(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        reply = self.send(method, path, **arguments)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def refused(self, method: str, path: str, **arguments: Any) -> tuple[int, str]:
        reply = self.send(method, path, **arguments)
        return reply.status_code, reply.json()["code"]


@pytest.fixture
def run() -> Iterator[FaultyRun]:
    with FaultyRun(ROUNDS, local_transport=False, min_block_size=64) as run:
        run.wait_for_round(5)
        yield run


@pytest.mark.extended
def test_rates_and_frozen_parameters_count_from_the_named_round_on(run: FaultyRun) -> None:
    """One pserver dies meanwhile, and replays what was set from its log; then the coordinator does."""
    admin, oracle = Administrator(run), Oracle()
    faster = admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.05})
    assert faster["controls"]["rates"] == {"0": 0.05}
    oracle.rates[faster["round"]] = 0.05
    stuck = admin.ask("PUT", "/v1/controls/frozen/0.weight")
    oracle.frozen[stuck["round"]] = {"0.weight"}
    assert faster["round"] < stuck["round"]
    events = [event["text"] for event in admin.send("GET", "/v1/events").json() if event["kind"] == "change"]
    assert events == [
        "set rate 0.05 is requested", f"set rate 0.05: from round {faster['round']} on",
        "freeze parameter 0.weight is requested", f"freeze parameter 0.weight: from round {stuck['round']} on",
    ]  # fmt: skip
    run.restart_pserver(1)
    other = admin.ask("PUT", "/v1/controls/frozen/2.weight")
    oracle.frozen[other["round"]] = {"0.weight", "2.weight"}
    run.restart_coordinator()
    assert admin.ask("GET", "/v1/controls")["frozen"] == ["0.weight", "2.weight"]
    free = admin.ask("DELETE", "/v1/controls/frozen/0.weight")
    oracle.frozen[free["round"]] = {"2.weight"}
    usual = admin.ask("PUT", "/v1/controls/rate", json={"rate": None})
    oracle.rates[usual["round"]] = None
    assert usual["round"] < ROUNDS
    assert run.results() == [oracle.result(ROUNDS)] * 2
    requests = [event["facts"] for event in admin.send("GET", "/v1/events").json() if event["by"]]
    done = [(facts["action"], facts["round"]) for facts in requests if facts["outcome"] == "done"]
    assert done == [
        ("set rate", faster["round"]),
        ("freeze", stuck["round"]),
        ("freeze", other["round"]),
        ("unfreeze", free["round"]),
        ("set rate", usual["round"]),
    ]
    assert len(requests) == 2 * len(done)


@pytest.mark.extended
def test_a_paused_run_stands_still_and_no_trainer_is_late() -> None:
    with FaultyRun(60, local_transport=False, round_timeout_seconds=2) as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        paused = admin.ask("POST", "/v1/controls/pause")
        run.wait_for_round(paused["round"] - 1)
        time.sleep(2.5)  # longer than a round may take: this is the thing that is tested, not a wait for a condition
        assert [run.round_of(rank) for rank in (0, 1)] == [paused["round"] - 1] * 2
        status = admin.ask("GET", "/v1/status")
        assert {pserver["heartbeat"]["round"] for pserver in status["pservers"]} == {paused["round"] - 1}
        assert (status["is_paused"], status["prospects"]) == (True, [])
        oracle = Oracle()
        frozen = admin.ask("PUT", "/v1/controls/frozen/0.bias")
        oracle.frozen[frozen["round"]] = {"0.bias"}
        run.kill(run.cluster.pservers[0])  # and stays so
        run.cluster.start_pserver(0)
        resumed = admin.ask("POST", "/v1/controls/resume")
        assert resumed["round"] == frozen["round"] == paused["round"]
        assert run.results() == [oracle.result(60)] * 2


@pytest.mark.extended
def test_asynchronous_runs_can_be_paused_and_their_rates_set() -> None:
    with FaultyRun(300, local_transport=False, mode="async") as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        assert admin.refused("POST", "/v1/rollback", json={"round": 0}) == (409, "mode_mismatch")
        admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.0})
        admin.ask("POST", "/v1/controls/pause")
        before = admin.send("GET", "/v1/parameters/0.bias")
        run.restart_gracefully(0)
        admin.ask("POST", "/v1/controls/resume")
        run.wait_for_round(run.round_of(0) + 20)
        after = admin.send("GET", "/v1/parameters/0.bias")
        versions = [int(reply.headers["gradpost-round"]) for reply in (before, after)]
        assert versions[1] > versions[0] + 20
        assert torch.equal(load(after.content)["0.bias"], load(before.content)["0.bias"])  # the rate is 0
        admin.ask("PUT", "/v1/controls/frozen/0.bias")
        admin.ask("PUT", "/v1/controls/rate", json={"rate": None})
        run.wait_for_round(run.round_of(0) + 20)
        frozen = admin.send("GET", "/v1/parameters/0.bias")
        other = admin.ask("GET", "/v1/statistics/0.weight")
        assert torch.equal(load(frozen.content)["0.bias"], load(before.content)["0.bias"])
        assert other["update_ratio"] > 0
        run.results()


# ---------------------------------------------------------------------- commands

Gradpost = Callable[..., Outcome]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRun]:
    place = tmp_path_factory.mktemp("checkpoints")
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as long_run:
        long_run.place = str(place)
        long_run.wait_for_round(15)
        yield long_run


@pytest.fixture
def gradpost(long_run: FaultyRun, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> Gradpost:  # noqa: F811
    monkeypatch.setenv("GRADPOST_COORDINATOR", long_run.cluster.address)

    def type_it(*arguments: object, exit_code: int = 0) -> Outcome:
        outcome = run_command(*arguments)
        assert (outcome.exit_code or 0) == exit_code, outcome
        return outcome

    return type_it


@pytest.mark.extended
@pytest.mark.parametrize(
    ("command", "exit_code", "shown"),
    [
        ("params", 0, r": 4 parameters\n(?s:.*)^0\.weight +64x20 +F32 +5,120 +0, 1$"),
        ("params 0.weight", 0, r"^0\.weight  64x20  round (?s:.*)^norm (?s:.*)^ +from +values$"),
        ("params -o HERE/m.safetensors", 0, r"^HERE/m\.safetensors: 4 tensors of round "),
        ("params 0.weight -o HERE/w.safetensors", 0, r"^HERE/w\.safetensors: 1 tensor of round "),
        ("params -o HERE/no/m.safetensors", 1, r"m\.safetensors cannot be written: No such file or directory$"),
        ("params -o HERE/m.npy", 2, r"--output must end in \.safetensors"),
        ("params x", 2, "there is no parameter 'x'"),
        ("checkpoint export HERE/m --round 3 --checkpoints PLACE", 1, "no complete checkpoint of round 3 in PLACE"),
        ("checkpoint export HERE/no/m --checkpoints PLACE", 1, "cannot be written"),
        ("checkpoint restore --round 3", 2, "gradpost checkpoint list prints the complete ones"),
        ("checkpoint list --checkpoints HERE/none", 0, "^there is no complete checkpoint in HERE/none$"),
        ("rate", 2, "give a learning rate, or --reset"),
        ("freeze x", 2, "there is no parameter 'x' in this run"),
        ("evict 7", 2, "trainer 7 is not a member of run"),
    ],
)
def test_a_command_shows(
    long_run: FaultyRun, gradpost: Gradpost, tmp_path: Path, command: str, exit_code: int, shown: str
) -> None:
    def place(text: str) -> str:
        return text.replace("HERE", str(tmp_path)).replace("PLACE", long_run.place)

    outcome = gradpost(*place(command).split(), exit_code=exit_code)
    assert re.search(place(shown), outcome.stderr if exit_code else outcome.stdout, re.MULTILINE), outcome
    for file in tmp_path.iterdir():
        make_model().load_state_dict(load_file(file), strict=file.name == "m.safetensors")


@pytest.mark.extended
def test_checkpoints(long_run: FaultyRun, gradpost: Gradpost, tmp_path: Path) -> None:
    created = json.loads(gradpost("checkpoint", "create", "--json").stdout)
    listed = json.loads(gradpost("checkpoint", "list", "--json").stdout)
    found = json.loads(gradpost("checkpoint", "list", "--checkpoints", long_run.place, "--json").stdout)
    assert created in listed
    assert {one["round"] for one in listed} == {one["round"] for one in found}
    target = tmp_path / "m.safetensors"
    gradpost("checkpoint", "export", target, "--checkpoints", long_run.place, "--round", created["round"])
    make_model().load_state_dict(load_file(target), strict=True)
    said = gradpost("checkpoint", "restore", "--round", created["round"]).stdout
    assert f"continues from round {created['round'] + 1:,} (attempt 1)" in said
    long_run.wait_for_line(f"the next step is {created['round'] + 1}", of="trainer 0")


@pytest.mark.extended
def test_changes_of_a_run(long_run: FaultyRun, gradpost: Gradpost) -> None:
    admin = Administrator(long_run)
    before = admin.ask("GET", "/v1/controls")
    for command, outcome in (
        ("pause", "is paused"),
        ("rate 0.05", "uses learning rate 0.05 for all parameter groups"),
        ("freeze 0.bias", "does not change parameter 0.bias"),
    ):
        assert re.fullmatch(rf"run \w+ {outcome} from round [\d,]+ on\n", gradpost(*command.split()).stdout)
    changed = admin.ask("GET", "/v1/controls")
    assert (changed["is_paused"], changed["rates"], changed["frozen"]) == (True, {"0": 0.05}, ["0.bias"])
    overrides = re.findall(r"^(.*) from round [\d,]+ on, set with no token at 20.*$", gradpost("status").stdout, re.M)
    assert overrides == ["learning rate 0.05 for parameter group 0", "parameter 0.bias is frozen"]
    assert re.search(", frozen\n(?s:.*)\nupdate_ratio +none\n", gradpost("params", "0.bias").stdout)
    for command in ("rate --group 0 --reset", "unfreeze 0.bias", "resume"):
        assert json.loads(gradpost(*command.split(), "--json").stdout)["round"] >= changed["since"]
    assert {**admin.ask("GET", "/v1/controls"), "since": before["since"]} == before


@pytest.mark.extended
def test_events_are_followed_over_a_restart_of_the_coordinator(long_run: FaultyRun, gradpost: Gradpost) -> None:
    assert "trainer 0 has joined" in gradpost("events").stdout
    newest = json.loads(gradpost("events", "--json").stdout.splitlines()[-1])["id"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "gradpost", "events", "--follow", "--json"],
        env=long_run.cluster.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as follow:  # fmt: skip
        assert follow.stdout is not None
        assert follow.stderr is not None
        for line in follow.stdout:
            if json.loads(line)["id"] == newest:
                break
        long_run.cluster.coordinator.signal(SIGKILL)
        assert "is unreachable; trying again until Ctrl-C" in follow.stderr.readline()
        long_run.cluster.restart_coordinator()
        assert json.loads(follow.stdout.readline())["id"] > newest  # by the next life of the coordinator
        follow.send_signal(SIGINT)
        assert follow.wait(30) == 0
        assert follow.stderr.read() == ""
