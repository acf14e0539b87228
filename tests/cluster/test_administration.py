"""A change by an administrator applies from the round that the answer names, to the bit; and the commands for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGINT, SIGKILL
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

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
        f"set rate 0.05: from round {faster['round']} on", f"freeze parameter 0.weight: from round {stuck['round']} on",
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
    audit = admin.send("GET", "/v1/audit").json()
    done = [(entry["action"], entry["round"]) for entry in audit if entry["outcome"] == "done"]
    assert done == [
        ("set rate", faster["round"]),
        ("freeze", stuck["round"]),
        ("freeze", other["round"]),
        ("unfreeze", free["round"]),
        ("set rate", usual["round"]),
    ]
    assert len(audit) == 2 * len(done)


@pytest.mark.extended
def test_a_paused_run_stands_still_and_no_trainer_is_late() -> None:
    with FaultyRun(60, local_transport=False, round_timeout_seconds=3) as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        paused = admin.ask("POST", "/v1/controls/pause")
        run.wait_for_round(paused["round"] - 1)
        time.sleep(4)  # longer than a round may take: this is the thing that is tested, not a wait for a condition
        assert [run.round_of(rank) for rank in (0, 1)] == [paused["round"] - 1] * 2
        status = admin.ask("GET", "/v1/status")
        assert {pserver["round"] for pserver in status["pservers"]} == {paused["round"] - 1}
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
def test_all_go_back_to_a_checkpoint(run: FaultyRun) -> None:
    admin, oracle = Administrator(run), Oracle()
    admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.02})
    made = admin.ask("POST", "/v1/checkpoints")
    run.wait_for_round(made["round"] + 10)
    assert admin.refused("POST", "/v1/rollback", json={"round": made["round"] + 1}) == (404, "not_found")
    undone = admin.send("GET", "/v1/parameters/0.weight").headers
    back = admin.ask("POST", "/v1/rollback", json={"round": made["round"]})
    newer = admin.send(
        "GET",
        "/v1/parameters/0.weight",
        params={"after_version": undone["gradpost-round"]},
        headers={"if-none-match": undone["etag"]},
    )
    assert newer.status_code == 200  # what it has is undone, however new
    assert int(newer.headers["gradpost-round"]) < int(undone["gradpost-round"])
    assert newer.headers["etag"].split(".")[1] == "1"
    assert (back["attempt"], back["round"]) == (1, made["round"] + 1)
    audit = admin.send("GET", "/v1/audit").json()
    oracle.rates[audit[1]["round"]] = 0.02
    assert run.results() == [oracle.result(ROUNDS)] * 2


@pytest.mark.extended
def test_asynchronous_runs_can_be_paused_and_their_rates_set() -> None:
    with FaultyRun(300, local_transport=False, mode="async", durability="log") as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        assert admin.refused("POST", "/v1/rollback", json={"round": 0}) == (409, "mode_mismatch")
        admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.0})
        admin.ask("POST", "/v1/controls/pause")
        before = admin.ask("GET", "/v1/parameters/0.bias", params={"format": "json"})
        run.restart_pserver(0)
        admin.ask("POST", "/v1/controls/resume")
        run.wait_for_round(run.round_of(0) + 20)
        after = admin.ask("GET", "/v1/parameters/0.bias", params={"format": "json"})
        assert after["round"] > before["round"] + 20
        assert after["values"] == before["values"]  # the rate is 0
        admin.ask("PUT", "/v1/controls/frozen/0.bias")
        admin.ask("PUT", "/v1/controls/rate", json={"rate": None})
        run.wait_for_round(run.round_of(0) + 20)
        frozen = admin.ask("GET", "/v1/parameters/0.bias", params={"format": "json"})
        other = admin.ask("GET", "/v1/statistics/0.weight")
        assert frozen["values"] == before["values"]
        assert other["update_ratio"] > 0
        run.results()


@pytest.mark.extended
def test_statistics_of_what_is_frozen_come_with_those_of_what_moves() -> None:
    """Its blocks are on two pservers, which look at them at different rounds: they are the same in all of these."""
    with FaultyRun(100_000, local_transport=False, min_block_size=64) as run, ThreadPoolExecutor() as threads:
        run.wait_for_round(5)
        admin = Administrator(run)
        admin.ask("PUT", "/v1/controls/frozen/0.weight")
        for _ in range(3):
            frozen, moving = threads.map(
                lambda name: admin.ask("GET", f"/v1/statistics/{name}"), ("0.weight", "2.weight")
            )
            assert frozen["update_ratio"] is None
            assert moving["update_ratio"] > 0
            assert (frozen["num_elements"], moving["num_elements"]) == (1280, 192)


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
def test_parameters(gradpost: Gradpost, tmp_path: Path) -> None:
    listed = gradpost("params").stdout
    assert ": 4 parameters\n" in listed
    assert re.search(r"^0\.weight +64x20 +F32 +5,120 +0, 1$", listed, re.MULTILINE), listed
    names = [one["name"] for one in json.loads(gradpost("params", "--json").stdout)["parameters"]]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    shown = gradpost("params", "0.weight").stdout.splitlines()
    assert shown[0].startswith("0.weight  64x20  round ")
    assert any(line.startswith("  norm ") for line in shown)
    counts = shown[shown.index("     from    values") + 1 :]
    assert sum(int(line.split()[1].replace(",", "")) for line in counts) == 1280
    document = json.loads(gradpost("params", "0.weight", "--json").stdout)
    assert document["num_elements"] == 1280
    assert gradpost("params", "0.weight", "-o", tmp_path / "w.npy").stdout.startswith(f"{tmp_path}/w.npy: ")
    assert np.load(tmp_path / "w.npy", allow_pickle=False).shape == (64, 20)


@pytest.mark.extended
def test_the_whole_model_that_trains(gradpost: Gradpost, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    said = gradpost("params", "-o", target).stdout
    assert said.startswith(f"{target}: 4 tensors of round ")
    make_model().load_state_dict(load_file(target), strict=True)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    said = gradpost("params", "-o", tmp_path / "nowhere" / "m.safetensors", exit_code=1).stderr
    assert said.endswith("m.safetensors cannot be written: No such file or directory\n")
    assert "must be written as FILE.safetensors" in gradpost("params", "-o", tmp_path / "m.npy", exit_code=2).stderr
    assert "there is no parameter 'x'" in gradpost("params", "x", exit_code=2).stderr


@pytest.mark.extended
def test_checkpoints(long_run: FaultyRun, gradpost: Gradpost, tmp_path: Path) -> None:
    created = json.loads(gradpost("checkpoint", "create", "--json").stdout)
    asked = json.loads(gradpost("checkpoint", "list", "--json").stdout)
    place = long_run.place
    found = json.loads(gradpost("checkpoint", "list", "--checkpoints", place, "--json").stdout)
    assert created in asked
    assert {one["round"] for one in asked} == {one["round"] for one in found}
    target = tmp_path / "m.safetensors"
    gradpost("checkpoint", "export", target, "--checkpoints", place, "--round", created["round"])
    make_model().load_state_dict(load_file(target), strict=True)
    said = gradpost("checkpoint", "export", target, "--checkpoints", place, "--round", 3, exit_code=1).stderr
    assert f"there is no complete checkpoint of round 3 in {place}. Choose one of rounds " in said
    said = gradpost("checkpoint", "export", tmp_path / "no" / "m", "--checkpoints", place, exit_code=1).stderr
    assert "cannot be written" in said
    assert said.count("\n") == 1
    said = gradpost("checkpoint", "restore", "--round", 3, exit_code=2).stderr
    assert "gradpost checkpoint list prints the complete ones" in said
    said = gradpost("checkpoint", "restore", "--round", created["round"]).stdout
    assert f"continues from round {created['round'] + 1:,} (attempt 1)" in said
    long_run.wait_for_line(f"the next step is {created['round'] + 1}", of="trainer 0")
    nothing = gradpost("checkpoint", "list", "--checkpoints", tmp_path / "none").stdout
    assert nothing == f"there is no complete checkpoint in {tmp_path}/none\n"


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
    for command in ("rate --group 0 --reset", "unfreeze 0.bias", "resume"):
        assert json.loads(gradpost(*command.split(), "--json").stdout)["round"] >= changed["since"]
    assert {**admin.ask("GET", "/v1/controls"), "since": before["since"]} == before
    assert "give a learning rate, or --reset" in gradpost("rate", exit_code=2).stderr
    assert "there is no parameter 'x' in this run" in gradpost("freeze", "x", exit_code=2).stderr
    assert "trainer 7 is not a member of run" in gradpost("evict", 7, exit_code=2).stderr


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


TENSORBOARD = "tensorboard.backend.event_processing.event_accumulator"
NUM_STEPS = 20


def read(folder: Path) -> Any:
    """Return all that TensorBoard finds in a folder."""
    accumulator = pytest.importorskip(TENSORBOARD, reason="pip install '.[tensorboard]'")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def train(session: Session, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    for step in range(NUM_STEPS):
        parameter.grad = torch.linspace(-1, step, len(parameter))
        optimizer.step()
        session.report(loss=1 / (1 + step), accuracy=0.5)
        session.summary()  # a heartbeat goes before it, so that each is a point


@pytest.mark.extended
def test_the_files_hold_what_the_api_says(tmp_path: Path) -> None:
    command = ["-m", "gradpost", "tensorboard", "--logdir", str(tmp_path), "--every-seconds", "0.1", "--coordinator"]
    with LocalCluster(trainers=1, min_block_size=300) as cluster, httpx.Client(base_url=cluster.address) as http:
        with Session(coordinator=cluster.address) as session:
            parameter = torch.nn.Parameter(torch.zeros(1000))
            optimizer = RemoteOptimizer(torch.optim.SGD([("w.x", parameter)], lr=0.1), session=session)
            train(session, optimizer, parameter)
            with subprocess.Popen(
                [sys.executable, "-P", *command, cluster.address],
                env=cluster.environment() | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
            ) as export:  # fmt: skip
                assert export.stdout is not None
                first = export.stdout.readline()
                assert first == f"run {session.run} goes to {tmp_path}; to see it: tensorboard --logdir {tmp_path}\n"
                train(session, optimizer, parameter)
                session.close()  # the long_run is finished, and so is the export
                assert export.wait(60) == 0
                last = export.stdout.read()
        curves = http.get("/v1/curves").json()["curves"]
        statistics = http.get("/v1/statistics/w.x").json()
        long_run = tmp_path / session.run
        again = run_process(*command, cluster.address)
    assert again.exit_code == 0, again.stderr  # and nothing is there twice
    assert [name for name in sorted(curves) if not name.startswith("gradpost/")] == ["accuracy", "loss"]
    for name, by_rank in curves.items():
        curve = by_rank["0"]
        values = [float(np.float32(value)) for value in curve["value"]]
        exported = [(event.wall_time, event.step, event.value) for event in read(long_run / "trainer-0").Scalars(name)]
        np.testing.assert_equal(exported, list(zip(curve["at"], curve["round"], values, strict=True)))  # also NaN
    assert len(curves["loss"]["0"]["round"]) == 2 * NUM_STEPS
    num_points = sum(len(curve["at"]) for by_rank in curves.values() for curve in by_rank.values())
    assert f"{num_points} points of curves" in last

    parameters = read(long_run / "parameters")
    newest = parameters.Histograms("w.x")[-1]
    assert newest.step == statistics["version"] == 2 * NUM_STEPS
    histogram, value = statistics["histogram"], newest.histogram_value
    edges = [histogram["begin"] + (i + 1) * histogram["width"] for i in range(len(histogram["counts"]))]
    assert (value.bucket_limit, value.bucket) == (edges, histogram["counts"])
    assert (value.min, value.max, value.num) == (statistics["minimum"], statistics["maximum"], 1000)
    assert value.sum == pytest.approx(statistics["mean"] * 1000)
    assert value.sum_squares == pytest.approx(statistics["norm"] ** 2)
    assert parameters.Scalars("norm/w.x")[-1].value == pytest.approx(statistics["norm"])
