"""Requests of an administrator, and rollbacks: what cannot be done leaves the run as it is."""

from __future__ import annotations

import httpx
import pytest

from ps_protocol.errors import Conflict, TryAgain
from ps_protocol.membership import FrozenRounds, HeldRun
from services.coordinator import administration
from services.coordinator.administration import Administration, RollBack, SetRate
from services.coordinator.coordinator import Coordinator

from .coordinating import FakePservers, eventually, heartbeat, leave, training
from .support import beat, leaving, list_checkpoints, registration


def outcomes(coordinator: Coordinator) -> list[str]:
    return [event.facts["outcome"] for event in coordinator.events.after(0) if event.by]


async def test_a_rollback_behind_the_rounds_of_a_trainer_that_is_done_is_refused() -> None:
    """The trainer would not train them again, so that the run would fail."""
    async with training() as coordinator:
        cluster = coordinator.cluster
        heartbeat(coordinator, 1, 4)
        leave(coordinator, 1, round=4)
        list_checkpoints(coordinator.cluster, [2])
        with pytest.raises(Conflict, match="trainer 1"):
            await Administration(coordinator).roll_back("me", RollBack(round=2))
        assert (cluster.run.record.state, cluster.run.rollback_to, outcomes(coordinator)) == (
            "training",
            None,
            ["failed"],
        )


async def test_a_change_that_takes_longer_than_its_request_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "WAIT_SECONDS", 0.3)
    pservers = FakePservers()
    async with training(pservers) as coordinator:
        may_go_on = pservers.hold("0")
        with pytest.raises(TryAgain, match="pending after"):
            await Administration(coordinator).pause("me")
        assert outcomes(coordinator) == ["failed"]
        may_go_on.set()
        cluster = coordinator.cluster
        await eventually(
            lambda: (
                bool(cluster.run.record.membership.controls)
                and cluster.run.installed_number == cluster.run.record.change_number
            )
        )
        assert cluster.run.record.membership.newest_controls.is_paused


async def test_controls_that_are_set_during_a_rollback_apply_from_its_round_on() -> None:
    """A pserver has lost the end of its log, so that the change becomes a rollback."""
    pservers = FakePservers()
    async with training(pservers) as coordinator:
        administrator, cluster = Administration(coordinator), coordinator.cluster
        await administrator.set_rate("me", SetRate(rate=0.5))
        pservers.short.add("0")
        done = await administrator.pause("me")
        assert (cluster.run.record.attempt, cluster.run.wanted_controls) == (1, None)
        assert (done.round, done.controls.is_paused, done.controls.rates) == (5, True, {0: 0.5})
        for taken in pservers.taken.values():
            controls = taken[-1].membership.controls
            assert [(one.since, one.is_paused, one.rates) for one in controls] == [(5, True, {0: 0.5})]


async def test_a_rollback_to_a_round_that_a_pserver_cannot_restore_is_refused() -> None:
    pservers = FakePservers()
    async with training(pservers) as coordinator:
        administrator, cluster = Administration(coordinator), coordinator.cluster
        list_checkpoints(coordinator.cluster, [3])
        pservers.ranges = [[0, 2]]
        with pytest.raises(Conflict, match="not every pserver can restore round 3"):
            await administrator.roll_back("me", RollBack(round=3))
        assert outcomes(coordinator) == ["failed"]
        assert (cluster.run.record.state, cluster.run.record.attempt, cluster.run.rollback_to) == (
            "training",
            0,
            None,
        )
        pservers.ranges = [[3, 3], [0, 2]]
        assert (await administrator.roll_back("me", RollBack(round=3))).round == 4


@pytest.mark.parametrize(
    ("does_a_trainer_leave", "expected"),
    [
        (True, "the rounds after 2 cannot be repeated, because trainer 1 left; the run continues without a rollback"),
        (False, "a pserver did not report which rounds it can restore"),
    ],
)
async def test_a_rollback_that_becomes_impossible_meanwhile_is_refused(does_a_trainer_leave: bool, expected: str):
    pservers = FakePservers()
    async with training(pservers) as coordinator:
        cluster = coordinator.cluster
        heartbeat(coordinator, 1, 4)
        list_checkpoints(cluster, [2])
        if does_a_trainer_leave:
            message = leaving("done", run=cluster.run.record.name, round=4, attempt=0)
            pservers.on_freeze = lambda: cluster.leave_trainer(1, message, coordinator.now())
        else:
            pservers.pages.append(httpx.Response(500, text="a shard cannot be read"))
        with pytest.raises(Conflict, match=expected):
            await Administration(coordinator).roll_back("me", RollBack(round=2))
        assert (cluster.run.record.state, cluster.run.record.attempt) == ("training", 0)
        assert outcomes(coordinator) == ["failed"]


@pytest.mark.parametrize("attempt", [0, None, 1])
async def test_a_trainer_that_leaves_with_rounds_of_the_attempt_before_a_rollback_ends_the_run(attempt: int | None):
    """The trainer learns of the rollback with its next step only, and there is none."""
    async with training() as coordinator:
        cluster = coordinator.cluster
        list_checkpoints(coordinator.cluster, [2])
        await Administration(coordinator).roll_back("me", RollBack(round=2))
        leave(coordinator, 1, round=4, attempt=attempt)
        if attempt == 0:
            assert cluster.run.record.failure.code == "pserver_lost"
            assert (
                "rounds 3 to 4 are lost and cannot be repeated, because trainer 1 left"
                in cluster.run.record.failure.detail
            )
        else:  # the trainer has trained them again, or the request does not name the attempt
            assert cluster.run.record.failure is None


# ---------------------------------------------------------------- pservers that come back without some rounds


@pytest.mark.parametrize(
    ("reported", "round_", "attempt", "is_rolled_back"),
    [
        (5, 5, 0, True),
        (5, 4, 0, True),  # others may have pulled it from one pserver
        (4, 5, 0, False),  # some clients send the round that is in progress
        (4, 9, 1, False),
    ],
)
async def test_rounds_that_a_lost_trainer_had_pulled_are_remembered(reported, round_, attempt, is_rolled_back) -> None:
    """The pservers have round 4 alone: the log of one was cut off, and the trainer that had round 5 has died."""
    pservers = FakePservers()
    async with training(pservers) as coordinator:
        cluster = coordinator.cluster
        cluster.pserver_heartbeat(0, beat(run=cluster.run.record.name, round_=reported), coordinator.now())
        heartbeat(coordinator, 0, round_, attempt=attempt)
        leave(coordinator, 0, "failed")
        await eventually(lambda: all(len(taken) == 2 for taken in pservers.taken.values()))
        assert cluster.run.record.attempt == is_rolled_back
        if is_rolled_back:
            assert (cluster.run.record.base_round, cluster.run.newest_received) == (4, 0)


@pytest.mark.parametrize("has_trained", [True, False])
async def test_a_run_begins_again_with_initial_values_only_before_its_first_round(has_trained: bool) -> None:
    """All pservers have lost their disks: a trainer could send trained values only."""
    pservers = FakePservers()
    async with training(pservers) as coordinator:
        cluster = coordinator.cluster
        heartbeat(coordinator, 0, 5 * has_trained)
        pservers.empty |= {"0", "1"}
        pservers.ranges = []
        cluster.run = cluster.run.with_change()
        coordinator.changed()
        await eventually(lambda: cluster.run.record.is_over or cluster.run.record.attempt == 1)
        assert (
            cluster.run.record.failure is not None and cluster.run.record.failure.code == "pserver_lost"
        ) == has_trained


@pytest.mark.parametrize(
    ("restored", "received", "named", "reported", "is_rolled_back"),
    [
        (4, 5, 2, None, True),
        (4, 5, 1, None, False),  # an earlier incarnation is named
        (4, 4, 2, None, False),  # nothing is lost
        (4, 9, 2, 5, False),  # the pserver has applied a round since it came back
        (None, 0, 1, 4, False),  # the pserver has never been away
    ],
)
async def test_a_trainer_causes_a_rollback_only_if_a_pserver_came_back_with_fewer_rounds(
    restored, received, named, reported, is_rolled_back
) -> None:
    async with training() as coordinator:
        cluster = coordinator.cluster
        if restored is not None:
            rounds = FrozenRounds(applied=restored)
            record = cluster.run.record
            held = HeldRun(run=record.name, attempt=0, plan=record.plan.digest, rounds=rounds)
            request = registration("new", address="http://0:1/", index=0, previous=1, held=held)
            cluster.register_pserver(request, coordinator.now())
            coordinator.changed()
            await eventually(lambda: not cluster.run.is_changing)
        if reported is not None:
            incarnation = cluster.registry.members[0].info.incarnation
            cluster.pserver_heartbeat(0, beat(incarnation, cluster.run.record.name, reported), coordinator.now())
        for _ in range(2):  # the second heartbeat changes nothing more
            heartbeat(coordinator, 0, received, ahead_of={0: named})
        assert cluster.run.is_changing == is_rolled_back
        coordinator.changed()
        await eventually(lambda: not cluster.run.is_changing)
        assert cluster.run.record.attempt == is_rolled_back
        if is_rolled_back:
            [event] = [event for event in coordinator.events.after(0) if event.kind == "rollback"]
            assert "pserver 0 came back with round 4, and trainer 0 has received round 5" in event.text
