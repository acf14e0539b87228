"""With policy `fail` and no log, when a process disappears or hangs, the others get an error that names it in time."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from ps_protocol.errors import TrainerLost, Unreachable
from trainer_client import Session, connect
from trainer_client.testing import LocalCluster

from .conftest import Carrier
from .faulty_run import SCRIPT
from .trainer_processes import Plot, Trainer
from .training_script import train
from .up_support import ROOT, wait_until

pytestmark = pytest.mark.cluster
LEASE_SECONDS = 1.0
ROUND_TIMEOUT_SECONDS = 2.0
SLACK_SECONDS = 1.5  # heartbeats, the coordinator's tick, a request or two
Play = Callable[..., list[Trainer]]


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    settings = {"on_trainer_loss": "fail", "durability": "none"}
    with LocalCluster(
        pservers=2,
        trainers=2,
        lease_seconds=LEASE_SECONDS,
        round_timeout_seconds=ROUND_TIMEOUT_SECONDS,
        **carrier,
        **settings,
    ) as cluster:
        wait_for_pservers(cluster)
        yield cluster


def wait_for_pservers(cluster: LocalCluster) -> None:
    assert wait_until(lambda: len(cluster.status().pservers) == 2, 60), cluster.output


@pytest.fixture
def play(cluster: LocalCluster) -> Iterator[Play]:
    """Start trainers; after the test the cluster must be able to serve an ordinary run."""
    trainers: list[Trainer] = []

    def play(*plots: Plot) -> list[Trainer]:
        trainers.extend(Trainer(cluster.address, rank, plot) for rank, plot in enumerate(plots))
        return trainers[-len(plots) :]

    def end() -> None:
        while trainers:
            trainers.pop().end()

    try:
        yield play
        end()
        for trainer in play(Plot(steps=3), Plot(steps=3)):
            assert trainer.wait_for_end().what == "done", trainer.events
    finally:
        end()


def test_a_trainer_that_is_killed_at_the_barrier(cluster: LocalCluster, play: Play) -> None:
    survivor, victim = play(Plot(), Plot(hangs_after=3))
    victim.wait_for("hanging")
    survivor.wait_for("round", 3)
    killed_at = victim.signal(signal.SIGKILL)
    error = survivor.wait_for_end()
    assert error.what == "trainer_lost", error
    assert "trainer 1 was lost: no heartbeat for" in error.text
    assert error.facts["ranks"] == [1]
    assert error.at - killed_at < LEASE_SECONDS + SLACK_SECONDS
    failure = cluster.status().failure
    assert failure is not None
    assert failure["detail"] in error.text


@pytest.mark.extended
def test_a_trainer_that_is_stopped_and_comes_back(cluster: LocalCluster, play: Play) -> None:
    victim, survivor = play(Plot(), Plot())
    survivor.wait_for("round", 3)
    stopped_at = victim.signal(signal.SIGSTOP)
    error = survivor.wait_for_end()
    assert error.what == "trainer_lost", error
    assert "trainer 0 was lost" in error.text
    assert error.at - stopped_at < LEASE_SECONDS + SLACK_SECONDS
    round_ = max(event.round for event in survivor.events)
    victim.signal(signal.SIGCONT)
    error = victim.wait_for_end()  # it is told that it is lost, and that its time is over
    assert error.what == "trainer_lost", error
    assert "trainer 0 was lost" in error.text
    assert [cluster.pserver_state(i).round for i in (0, 1)] in ([round_] * 2, [round_ + 1] * 2)


@pytest.mark.extended
def test_a_trainer_that_hangs_while_its_heartbeats_live(cluster: LocalCluster, play: Play) -> None:
    survivor, victim = play(Plot(), Plot(hangs_after=3))
    hung = victim.wait_for("hanging")
    error = survivor.wait_for_end()
    assert error.what == "round_timeout", error
    assert "trainer 1 did not reach the batch barrier of round 4 within the round time-out of 2 s" in error.text
    assert error.facts["missing"] == [1]
    assert ROUND_TIMEOUT_SECONDS - 0.5 < error.at - hung.at < ROUND_TIMEOUT_SECONDS + SLACK_SECONDS
    failure = cluster.status().failure
    assert failure is not None
    assert (failure["code"], failure["missing"]) == ("round_timeout", [1])  # not the one who gave up waiting
    victim.wake()
    error = victim.wait_for_end()
    assert error.what == "round_timeout", error
    assert "trainer 1 did not reach" in error.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.extended
def test_a_pserver_that_is_killed_or_stopped(cluster: LocalCluster, play: Play, number: signal.Signals) -> None:
    trainers = play(Plot(), Plot())
    for trainer in trainers:
        trainer.wait_for("round", 3)
    victim = cluster.pservers[-1]
    victim.signal(number)
    at = time.monotonic()
    for trainer in trainers:
        error = trainer.wait_for_end()
        assert error.what in ("pserver_lost", "unreachable"), error
        assert f"pserver {victim.name.split()[-1]}" in error.text
        assert error.at - at < LEASE_SECONDS + SLACK_SECONDS
    if number == signal.SIGKILL:
        victim.wait(10)
        cluster.start_pserver(int(victim.name.split()[-1]))
    else:
        victim.signal(signal.SIGCONT)
    wait_for_pservers(cluster)


@pytest.mark.extended
def test_a_script_that_raises_leaves_as_failed_with_its_reason(cluster: LocalCluster) -> None:
    command = [sys.executable, str(SCRIPT), "9", "0", "1:3:raise"]
    script = cluster.start_trainer(1, command, {"PYTHONPATH": str(ROOT)})
    said = pytest.raises(TrainerLost, match="trainer 1 failed: ValueError: no data")
    with Session(coordinator=cluster.address, rank=0, world_size=2) as session, said as error:
        train(session, rounds=9, pause=0, trouble="", kind="regression")
    assert error.value.facts["ranks"] == [1]
    assert script.wait(30) == 1
    assert any("ValueError: no data" in line for line in cluster.output)
    assert cluster.status().state == "failed"
    assert cluster.summary().line().startswith("failed: mode=sync")


def test_a_coordinator_that_was_never_started() -> None:
    with socket.socket() as silent:  # bound and not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(Unreachable, match=f"{address} did not answer for 0.5 s .*is it running"):
            connect(address, retry_seconds=0.5)
        assert 0.5 < time.monotonic() - begun < 0.5 + SLACK_SECONDS
