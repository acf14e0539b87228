"""A bit flips in a file of a service: it is said, with what to do, and then the run goes on; nobody believes it.

What a damaged log or checkpoint costs is in tests/unit/pserver/durable and, for a whole cluster, in test_faults.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from .faulty_run import FaultyRun, expected_result
from .test_resume import ROUNDS, train

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]

PATIENT = ("--lease-seconds", 5)  # nothing is lost here


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_pserver_does_not_believe_a_damaged_identity(tmp_path: Path) -> None:
    with FaultyRun(80, state_dir=tmp_path, checkpoint_rounds=5) as run:
        run.wait_for_round(12)
        run.kill(run.cluster.pservers[1])
        identity = tmp_path / "pserver-1" / "identity.json"
        flip(identity)
        assert run.cluster.start_pserver(1).wait(30) == 1
        line = run.wait_for_line("identity.json is damaged")
        assert "delete it, and the run goes back to the newest checkpoint" in line
        identity.unlink()
        run.cluster.start_pserver(1)
        assert "the run is rolled back" in run.wait_for_line("the run is rolled back")
        assert run.results() == [expected_result(80)] * 2
        assert not [line for line in run.lines if "Traceback" in line]


def test_a_coordinator_does_not_believe_a_damaged_state(tmp_path: Path) -> None:
    code, output = train(tmp_path, *PATIENT)
    assert code == 0, output
    [state] = tmp_path.glob(".gradpost/*/coordinator.json")
    flip(state)
    code, output = train(tmp_path, *PATIENT, "--resume")
    assert code == 1
    assert "coordinator.json is damaged" in output
    assert "delete it" in output
    assert "Traceback" not in output
    state.unlink()
    code, output = train(tmp_path, *PATIENT, "--resume", rounds=2 * ROUNDS)
    assert code == 0, output
    assert output.count(f"begin {ROUNDS}") == 2, output
    assert output.count(f"result {expected_result(2 * ROUNDS)}") == 2, output


def test_an_administrator_does_not_take_a_run_back_to_a_damaged_checkpoint(tmp_path: Path) -> None:
    """There is no log, so nothing else leads to that round: nothing is undone for it."""
    with FaultyRun(100, state_dir=tmp_path, durability="none") as run:
        run.wait_for_round(5)
        rounds = []
        for _ in range(2):
            rounds.append(httpx.post(f"{run.cluster.address}/v1/checkpoints", timeout=60).json()["round"])
            run.wait_for_round(rounds[-1] + 3)
        [shard] = tmp_path.glob(f"checkpoints/*/{rounds[1]:012}/pserver-1-of-2.safetensors")
        flip(shard)
        damaged, whole = (
            httpx.post(f"{run.cluster.address}/v1/rollback", json={"round": round_}, timeout=60)
            for round_ in (rounds[1], rounds[0])
        )
        assert (damaged.status_code, damaged.json()["code"]) == (409, "conflict")
        assert f"not every pserver can restore round {rounds[1]}" in damaged.json()["detail"]
        assert f"{shard.name} in " in run.wait_for_line("a checkpoint is damaged")
        assert (whole.status_code, whole.json()["attempt"], whole.json()["round"]) == (200, 1, rounds[0] + 1)
        assert run.results() == [expected_result(100)] * 2


def test_others_do_not_go_on_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    """It is said at once which file it is: to read it again and again would not help."""
    code, output = train(tmp_path, *PATIENT, "--checkpoint-rounds", 20)
    assert code == 0, output
    [shard] = tmp_path.glob(f".gradpost/*/checkpoints/*/{ROUNDS:012}/pserver-1-of-2.safetensors")
    flip(shard)
    onto_three = (*PATIENT, "--resume", "--pservers", 3)
    code, output = train(tmp_path, *onto_three)
    assert code == 1
    assert "StorageFailed: pserver " in output
    place = shard.parent.parent.parent.relative_to(tmp_path)
    assert f"{shard.name} in {place} is damaged" in output
    shutil.rmtree(shard.parent)  # the only one: the run has ended
    code, output = train(tmp_path, *onto_three)
    assert code == 2
    assert "there is no run to resume" in output
