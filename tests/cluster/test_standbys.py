"""A standby has the bits of its pserver, whatever dies, and training does not notice it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx
import pytest

from ps_config.tokens import SCOPES
from ps_protocol.messages import PserverState
from trainer_client.testing import Child

from .faulty_run import FaultyRun
from .up_support import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ENDLESS = 1_000_000  # rounds
CLIPPED: dict[str, Any] = {"kind": "decaying", "environment": {"GRADPOST_MAX_GRAD_NORM": "0.05"}}


def wait_for_standby(run: FaultyRun, index: int, round_: int, *, attempt: int = 0) -> None:
    """Wait until a standby has this round. A killed one is listed until its lease ends."""

    def is_there() -> bool:
        found = [s for s in run.cluster.status().standbys if s.follows == index and s.run is not None]
        return any(s.attempt == attempt and s.round >= round_ for s in found)

    assert wait_until(is_there, 60), run.cluster.status().standbys


def has_bits(run: FaultyRun, index: int) -> bool:
    """Return whether the only standby of a pserver that is idle has its round and its bits."""
    leader = run.cluster.view.pserver_state(index, digest=True)
    found = []
    for standby in (s for s in run.cluster.status().standbys if s.follows == index):
        with suppress(httpx.TransportError):  # a killed one is listed until its lease ends
            answer = httpx.get(f"{standby.address}/v1/state", params={"digest": "true"}, timeout=30, trust_env=False)
            state = PserverState.from_answer(answer.raise_for_status().content)
            found.append((state.round, state.run, str(state.digest).partition("-")[0]))
    return found == [(leader.round, leader.run, str(leader.digest).partition("-")[0])]


def stop(child: Child) -> None:
    begun = time.monotonic()
    child.signal(SIGTERM)
    assert child.wait(20) == 0
    assert time.monotonic() - begun < 5


def test_a_standby_catches_up_after_deaths_and_a_rollback() -> None:
    with FaultyRun(ENDLESS, local_transport=False, checkpoint_rounds=50, **CLIPPED) as run:
        first, _ = run.cluster.start_standby(0), run.cluster.start_standby(1)
        for index in (0, 1):
            wait_for_standby(run, index, 1)
        run.kill(run.cluster.pservers[0])
        run.cluster.start_pserver(0)
        run.wait_for_line("run installed", 2, of="pserver 0")
        wait_for_standby(run, 0, run.cluster.view.pserver_state(0).round)
        run.kill(first)
        second = run.cluster.start_standby(0)
        run.wait_for_line("replica copied", 2, of="standby of pserver 0")  # after the restart it needed none
        made = run.make_checkpoint()
        run.wait_for_round(made + 20)
        run.cluster.view.roll_back(made)
        run.wait_for_line("replica restored", of="standby of pserver 1")
        for index in (0, 1):
            wait_for_standby(run, index, run.cluster.view.pserver_state(index).round + 20, attempt=1)
        for child in run.cluster.trainers:
            run.kill(child)
        for index in (0, 1):
            assert wait_until(lambda index=index: has_bits(run, index), 60)
        stop(second)
        assert not [s for s in run.cluster.status().standbys if s.follows == 0]
        lines = [json.loads(line.partition("] ")[2]) for line in run.lines if line.startswith("[standby of pserver 1")]
        copied = [line["round"] for line in lines if line["event"] == "replica copied"]
        assert len(copied) == 1
        assert not [line for line in lines if line["level"] == "error"]


def test_a_pserver_that_stops_is_replaced_and_follows_when_it_returns() -> None:
    with FaultyRun(500, durability="replicated") as run:
        run.cluster.start_standby(0)
        run.wait_for_sync(0)
        pserver = run.cluster.pservers[0]
        stop(pserver)
        run.wait_for_round(run.round_of(0) + 30)
        assert run.cluster.status().pservers[0].heartbeat.incarnation == 2
        run.cluster.start_pserver(0)
        run.wait_for_sync(0)
        run.check_results()


def test_a_standby_ends_with_the_cluster() -> None:
    with FaultyRun(500, local_transport=False, exit_when_done=True) as run:
        standby = run.cluster.start_standby(0)
        run.wait_for_line("replica copied")
        run.check_results()
        assert run.cluster.coordinator.wait(60) == 0
        assert standby.wait(20) == 0


def test_a_run_without_a_log_refuses_standbys() -> None:
    with FaultyRun(ENDLESS, pservers=1, trainers=1, durability="none") as run:
        standby, mistaken = run.cluster.start_standby(0), run.cluster.start_standby(7)
        assert mistaken.wait(60) == 1
        assert "world_mismatch" in run.wait_for_line("cannot follow", of="standby of pserver 7")
        assert standby.wait(60) == 1
        assert "no_update_log" in run.wait_for_line("cannot follow", of="standby of pserver 0")
        run.wait_for_round(run.round_of(0) + 10)


def test_a_standby_needs_a_token_of_scope_replicate_only(tmp_path: Path) -> None:
    for scope in SCOPES:
        (tmp_path / scope).write_text(f"{scope}-token-0123456789abcdef\n")
        (tmp_path / scope).chmod(0o600)
    with FaultyRun(ENDLESS, pservers=1, trainers=1, tokens_dir=tmp_path) as run:
        run.cluster.start_standby(0, GRADPOST_TOKEN_FILE=str(tmp_path / "replicate"))
        run.wait_for_line("replica copied")
