"""With policy `fail` and no log, when a process disappears or hangs, the others get an error that names it in time.

Most of this is waiting, so that each scenario is played over HTTP/2 and HTTP/1.1 at once.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from ps_protocol.errors import TrainerLost, Unreachable
from trainer_client import Session, connect
from trainer_client.testing import LocalCluster

from .faulty_run import SCRIPT
from .trainer_processes import Plot, Trainer
from .training_script import train
from .up_support import ROOT

pytestmark = pytest.mark.cluster
LEASE_SECONDS = 1.0
ROUND_TIMEOUT_SECONDS = 2.0
SLACK_SECONDS = 1.5  # heartbeats, the coordinator's tick, a request or two


class Stage:
    """One cluster and the trainers of one scenario."""

    def __init__(self, cluster: LocalCluster, version: str) -> None:
        self.cluster = cluster
        self.version = version
        self._trainers: list[Trainer] = []

    def play(self, *plots: Plot) -> list[Trainer]:
        trainers = [Trainer(self.cluster.address, rank, plot) for rank, plot in enumerate(plots)]
        self._trainers += trainers
        return trainers

    def clear(self) -> None:
        while self._trainers:
            self._trainers.pop().end()

    def wait_for_pservers(self) -> None:
        deadline = time.monotonic() + 60
        while len(self.cluster.status().pservers) < 2:
            assert time.monotonic() < deadline, self.cluster.output
            time.sleep(0.05)


Scenario = Callable[[Stage], None]
Play = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def stages() -> Iterator[list[Stage]]:
    with ExitStack() as stack:
        stages = []
        for version in ("HTTP/2", "HTTP/1.1"):
            cluster = LocalCluster(
                pservers=2,
                trainers=2,
                http2=version == "HTTP/2",
                local_transport=False,
                lease_seconds=LEASE_SECONDS,
                round_timeout_seconds=ROUND_TIMEOUT_SECONDS,
                on_trainer_loss="fail",
                durability="none",
            )
            stages.append(Stage(stack.enter_context(cluster), version))
        for stage in stages:
            stage.wait_for_pservers()
        yield stages


@pytest.fixture
def play(stages: list[Stage]) -> Iterator[Play]:
    """Plays a scenario over both versions of HTTP; afterwards each cluster must be able to serve an ordinary run."""

    def play(scenario: Scenario) -> None:
        def whole(stage: Stage) -> None:
            try:
                scenario(stage)
                stage.clear()
                for trainer in stage.play(Plot(steps=3), Plot(steps=3)):
                    assert trainer.wait_for_end().what == "done", trainer.events
            except BaseException as error:
                error.add_note(f"over {stage.version}; the last lines of its cluster:")
                error.add_note("\n".join([*stage.cluster.output][-12:]))
                raise
            finally:
                stage.clear()

        with ThreadPoolExecutor(len(stages)) as both:
            errors = [f.exception() for f in [both.submit(whole, stage) for stage in stages]]
        for error in errors:
            if error is not None:
                raise error

    return play


def test_a_trainer_that_is_killed_at_the_barrier(play: Play) -> None:
    def scenario(stage: Stage) -> None:
        survivor, victim = stage.play(Plot(), Plot(hangs_after=3))
        victim.wait_for("hanging")
        survivor.wait_for("round", 3)
        killed_at = victim.signal(signal.SIGKILL)
        error = survivor.wait_for_end()
        assert error.what == "trainer_lost", error
        assert "trainer 1 was lost: no heartbeat for" in error.text
        assert error.facts["ranks"] == [1]
        assert error.at - killed_at < LEASE_SECONDS + SLACK_SECONDS
        failure = stage.cluster.status().failure
        assert failure is not None
        assert failure["detail"] in error.text

    play(scenario)


@pytest.mark.extended
def test_a_trainer_that_is_stopped_and_comes_back(play: Play) -> None:
    def scenario(stage: Stage) -> None:
        victim, survivor = stage.play(Plot(), Plot())
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
        assert [stage.cluster.pserver_state(i).round for i in (0, 1)] in ([round_] * 2, [round_ + 1] * 2)

    play(scenario)


@pytest.mark.extended
def test_a_trainer_that_hangs_while_its_heartbeats_live(play: Play) -> None:
    def scenario(stage: Stage) -> None:
        survivor, victim = stage.play(Plot(), Plot(hangs_after=3))
        hung = victim.wait_for("hanging")
        error = survivor.wait_for_end()
        assert error.what == "round_timeout", error
        assert "trainer 1 did not reach the batch barrier of round 4 within the round time-out of 2 s" in error.text
        assert error.facts["missing"] == [1]
        assert ROUND_TIMEOUT_SECONDS - 0.5 < error.at - hung.at < ROUND_TIMEOUT_SECONDS + SLACK_SECONDS
        failure = stage.cluster.status().failure
        assert failure is not None
        assert (failure["code"], failure["missing"]) == ("round_timeout", [1])  # not the one who gave up waiting
        victim.wake()
        error = victim.wait_for_end()
        assert error.what == "round_timeout", error
        assert "trainer 1 did not reach" in error.text

    play(scenario)


@pytest.mark.extended
def test_a_trainer_that_hangs_before_it_uploads_the_initial_values(play: Play) -> None:
    def scenario(stage: Stage) -> None:
        victim, survivor = stage.play(Plot(hangs_after=0), Plot())
        hung = victim.wait_for("hanging")
        error = survivor.wait_for_end()
        assert error.what == "round_timeout", error
        assert "trainer 0 did not" in error.text
        assert error.at - hung.at < ROUND_TIMEOUT_SECONDS + SLACK_SECONDS

    play(scenario)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.extended
def test_a_pserver_that_is_killed_or_stopped(play: Play, number: signal.Signals) -> None:
    def scenario(stage: Stage) -> None:
        trainers = stage.play(Plot(), Plot())
        for trainer in trainers:
            trainer.wait_for("round", 3)
        victim = stage.cluster.pservers[-1]
        victim.signal(number)
        at = time.monotonic()
        for trainer in trainers:
            error = trainer.wait_for_end()
            assert error.what in ("pserver_lost", "unreachable"), error
            assert f"pserver {victim.name.split()[-1]}" in error.text
            assert error.at - at < LEASE_SECONDS + SLACK_SECONDS
        if number == signal.SIGKILL:
            victim.wait(10)
            stage.cluster.start_pserver(int(victim.name.split()[-1]))
        else:
            victim.signal(signal.SIGCONT)
        stage.wait_for_pservers()

    play(scenario)


@pytest.mark.extended
def test_a_coordinator_that_is_paused_blames_nobody(play: Play) -> None:
    """An ordinary step needs no coordinator, and no heartbeat is missing that it could not read."""

    def scenario(stage: Stage) -> None:
        trainers = stage.play(Plot(), Plot())
        for trainer in trainers:
            trainer.wait_for("round", 3)
        stage.cluster.coordinator.signal(signal.SIGSTOP)
        time.sleep(1.5 * LEASE_SECONDS)
        during = [trainer.drain() for trainer in trainers]
        stage.cluster.coordinator.signal(signal.SIGCONT)
        time.sleep(1.5 * LEASE_SECONDS)
        assert stage.cluster.status().state == "training"
        for trainer, round_ in zip(trainers, during, strict=True):
            assert trainer.drain() > round_ > 3

    play(scenario)


@pytest.mark.extended
def test_a_script_that_raises_leaves_as_failed_with_its_reason(stages: list[Stage]) -> None:
    stage = stages[0]
    command = [sys.executable, str(SCRIPT), "9", "0", "1:3:raise"]
    script = stage.cluster.start_trainer(1, command, {"PYTHONPATH": str(ROOT)})
    try:
        said = pytest.raises(TrainerLost, match="trainer 1 failed: ValueError: no data")
        with Session(coordinator=stage.cluster.address, rank=0, world_size=2) as session, said as error:
            train(session, rounds=9, pause=0, trouble="", kind="regression")
        assert error.value.facts["ranks"] == [1]
        assert script.wait(30) == 1
        assert any("ValueError: no data" in line for line in stage.cluster.output)
        assert stage.cluster.status().state == "failed"
        assert stage.cluster.summary().line().startswith("failed: mode=sync")
    finally:
        stage.clear()


def test_a_coordinator_that_was_never_started() -> None:
    with socket.socket() as silent:  # bound and not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(Unreachable, match=f"{address} did not answer for 0.5 s .*is it running"):
            connect(address, retry_seconds=0.5)
        assert 0.5 < time.monotonic() - begun < 0.5 + SLACK_SECONDS
