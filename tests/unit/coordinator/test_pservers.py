from __future__ import annotations

import pytest

from ps_protocol.errors import StalePserver
from services.coordinator.pservers import PserverRegistry

from ...raising import raises_code
from .support import LEASE, beat, registration


def make_registry(num_pservers: int = 2) -> PserverRegistry:
    return PserverRegistry(num_pservers, LEASE)


def test_pservers_get_the_free_indices_in_order():
    registry = make_registry()
    first = registry.register(registration("a"), 0)
    second = registry.register(registration("b"), 0)
    assert [(a.index, a.incarnation, a.lease_seconds) for a in (first, second)] == [(0, 1, LEASE), (1, 1, LEASE)]
    assert registry.is_complete
    assert registry.members[0].info.address == "http://a:1"  # without the slash


def test_an_index_that_was_asked_for_is_given():
    registry = make_registry()
    assert registry.register(registration("a", index=1), 0).index == 1
    assert registry.register(registration("b"), 0).index == 0


def test_the_same_process_again_gets_the_same_answer_and_renews_its_lease():
    registry = make_registry()
    first = registry.register(registration("a"), 0)
    assert registry.register(registration("a"), 8) == first
    assert registry.register(registration("a", index=1), 8) == first  # it has an index already
    assert registry.expire(12) == []


def test_one_too_many_is_refused():
    registry = make_registry(1)
    registry.register(registration("a"), 0)
    with raises_code("index_taken", match="has its 1 pservers"):
        registry.register(registration("b"), 0)
    with raises_code("world_mismatch", match="pserver 1 is beyond"):
        registry.register(registration("b", index=1), 0)
    assert list(registry.members) == [0]


def test_a_second_pserver_for_an_index_waits_for_the_lease_of_the_first():
    registry = make_registry()
    registry.register(registration("a", index=0), 0)
    with raises_code("index_taken", match="http://a:1") as caught:
        registry.register(registration("b", index=0), 9)
    assert caught.value.may_be_retried
    registry.heartbeat(0, beat(), 9)
    with raises_code("index_taken"):
        registry.register(registration("b", index=0), 15)  # while it is renewed
    [lost] = registry.expire(19.5)
    assert lost.instance == "pserver a"
    answer = registry.register(registration("b", index=0), 19.5)
    assert (answer.index, answer.incarnation) == (0, 2)


def test_a_lease_ends_after_its_time_and_not_before():
    registry = make_registry()
    registry.register(registration("a"), 0)
    assert registry.expire(LEASE) == []
    assert [m.info.index for m in registry.expire(LEASE + 0.001)] == [0]
    assert registry.expire(100) == []
    assert not registry.is_complete


def test_a_heartbeat_of_an_unknown_pserver_or_of_an_older_life_is_refused():
    registry = make_registry()
    with pytest.raises(StalePserver, match="register again"):
        registry.heartbeat(0, beat(), 0)
    registry.register(registration("a", index=0), 0)
    registry.expire(20)
    registry.register(registration("b", index=0), 20)
    with pytest.raises(StalePserver) as caught:
        registry.heartbeat(0, beat(incarnation=1), 25)  # SIGCONT after its lease
    assert caught.value.facts == {"current": 2}
    assert registry.expire(30.5) != []  # and has renewed nothing


def test_a_process_that_lost_its_lease_comes_back_as_another_life():
    registry = make_registry()
    registry.register(registration("a"), 0)
    registry.expire(20)
    assert registry.register(registration("a"), 20).incarnation == 2


def test_a_heartbeat_tells_the_progress():
    registry = make_registry()
    registry.register(registration("a"), 0)
    registry.heartbeat(0, beat(run="run1", round_=7, missing=(1,), waiting_seconds=2.5), 3)
    member = registry.members[0]
    assert (member.run, member.round, member.missing, member.waiting_seconds) == ("run1", 7, (1,), 2.5)
    assert member.seen_at == 3


def test_who_does_not_reach_a_pserver_for_a_lease_that_is_heard_meanwhile_is_cut_off():
    registry = make_registry()
    registry.register(registration("a"), 0)
    registry.heartbeat(0, beat(), 12)
    assert registry.was_reachable(0, 1, since=4.9, now=15)
    assert not registry.was_reachable(0, 1, since=5.1, now=15)  # for less than a lease
    assert not registry.was_reachable(0, 2, since=4.9, now=15)  # another life
    assert not registry.was_reachable(1, 1, since=4.9, now=15)


def test_nobody_is_cut_off_from_a_pserver_that_came_a_moment_ago_stops_or_has_died():
    registry = make_registry()
    registry.register(registration("a"), 6)
    registry.heartbeat(0, beat(), 14)
    assert not registry.was_reachable(0, 1, since=0, now=15)
    registry.heartbeat(0, beat(), 20)
    assert registry.was_reachable(0, 1, since=9, now=20)
    registry.heartbeat(0, beat(is_stopping=True), 20)
    assert not registry.was_reachable(0, 1, since=9, now=20)
    registry.heartbeat(0, beat(), 20)
    assert not registry.was_reachable(0, 1, since=19.5, now=29.9)  # its lease ends at 30, and will not be renewed


def test_trainers_are_told_of_the_unix_socket_of_the_life_that_has_it():
    registry = make_registry()
    names = ["gradpost-" + 32 * digit for digit in "01"]
    registry.register(registration("a", index=0, local=names[0]), 0)
    assert registry.members[0].info.local == names[0]
    registry.register(registration("b", index=0, previous=1, local=names[1]), 1)
    assert registry.members[0].info.local == names[1]
    registry.register(registration("c", index=0, previous=2), 2)
    assert registry.members[0].info.local is None
