"""The faults of a pserver and its standby, among them those in the middle of a fail-over.

All have the role of a pserver, so that a shard has one of them at a time. None of them may lose an acknowledged round.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import psutil

from ps_protocol.messages import ClusterStatus
from trainer_client.testing import Child

from .chaos_cluster import stopped
from .faults import CHANGE_FAILPOINTS, DYING_SECONDS, fault
from .setup import LEASE_SECONDS, Setup

if TYPE_CHECKING:
    from .episode import Episode

# An episode, the name of the pserver, its process, and that of a standby in sync.
InjectPair: TypeAlias = "Callable[[Episode, str, Child, Child], bool | None]"

JOIN_SECONDS = 25.0  # for a standby to be ready to replace its pserver
ALONE_SECONDS = 8.0  # for a pserver to continue without its standby
STOP_CHECK_SECONDS = 0.02
_PROMOTION = ("fence.before", "promote.before", "promote.after")


def has_standbys(setup: Setup) -> bool:
    return setup.num_standbys > 0


def may_continue_alone(setup: Setup) -> bool:
    return has_standbys(setup) and setup.replica_loss == "continue"


def standby_fault(kind: str, fits: Callable[[Setup], bool] = has_standbys) -> Callable[[InjectPair], InjectPair]:
    """Register a fault that begins once a standby may replace the pserver. It has no effect if none may in time."""

    def register(inject: InjectPair) -> InjectPair:
        def find_and_inject(episode: Episode, victim: str) -> bool | None:
            found = episode.poll(lambda: find_replicas(episode, victim), JOIN_SECONDS)
            return False if found is None else inject(episode, victim, *found)

        fault(kind, "pserver", fits)(find_and_inject)
        return inject

    return register


def find_standbys(status: ClusterStatus, index: int) -> list[str]:
    """Return the addresses of the standbys that may replace a pserver."""
    return [one.address for one in status.standbys if one.follows == index and one.role == "in_sync" and one.run]


def find_replicas(episode: Episode, victim: str) -> tuple[Child, Child] | None:
    """Return the process of a pserver and that of a standby which may replace it, if there is one now."""
    index, cluster = int(victim.split()[1]), episode.cluster
    status = cluster.status()
    living = {cluster.find_address(c): c for c in [*cluster.pservers, *cluster.standbys] if c.is_running}
    leaders = [living[p.address] for p in status.pservers if p.index == index and p.address in living]
    standbys = [living[address] for address in find_standbys(status, index) if address in living]
    return (leaders[0], standbys[0]) if leaders and standbys else None


def wait_for_stop(episode: Episode, child: Child) -> bool:
    """Return whether a service stands still at its failpoint in time."""
    process = psutil.Process(child.pid)
    is_stopped = episode.poll(
        lambda: process.status() == psutil.STATUS_STOPPED, DYING_SECONDS, pause_seconds=STOP_CHECK_SECONDS
    )
    return bool(is_stopped)


@standby_fault("standby lost")
def _kill_standby(episode: Episode, victim: str, leader: Child, standby: Child) -> None:
    episode.kill(f"standby of {victim}", standby)
    episode.sleep(0, 2)


@standby_fault("standby paused")
def _pause_standby(episode: Episode, victim: str, leader: Child, standby: Child) -> None:
    with stopped(standby):
        episode.sleep(0.2, LEASE_SECONDS + 2)


@standby_fault("pserver and standby killed together")
def _kill_both(episode: Episode, victim: str, leader: Child, standby: Child) -> None:
    episode.kill(victim, leader, may_report=True)
    episode.sleep(0, 0.02)
    episode.kill(f"standby of {victim}", standby)
    episode.sleep(0, 1)


@standby_fault("pserver and its disk lost")
def _lose_disk(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    folder = episode.cluster.find_folder(leader)
    episode.kill(victim, leader, may_report=True)
    if folder is not None:
        shutil.rmtree(folder)
    episode.sleep(0, 2)
    return folder is not None


@standby_fault("pserver killed after it continued alone", may_continue_alone)
def _kill_alone(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    index, cluster, proxy = int(victim.split()[1]), episode.cluster, episode.cluster.proxies[leader]
    is_cut_off = episode.chance.random() < 0.5  # else it is dead
    with proxy.cut_off(cluster.name_process(standby) if is_cut_off else None):  # it lives, and must not be promoted
        if not is_cut_off:
            episode.kill(f"standby of {victim}", standby)
        episode.poll(lambda: not find_standbys(cluster.status(), index), ALONE_SECONDS)
        alone_at = time.monotonic()
        is_alone = episode.poll(lambda: episode.has_stepped_since(alone_at), ALONE_SECONDS)
        if is_alone:
            episode.kill(victim, leader)
            episode.sleep(0, LEASE_SECONDS + 1)
    return bool(is_alone)


@standby_fault("pserver and standby cut off from each other")
def _cut_off(episode: Episode, victim: str, leader: Child, standby: Child) -> None:
    """Cut them off, and half of the times the pserver from the coordinator, too, while trainers reach both."""
    cluster, with_coordinator = episode.cluster, episode.chance.random() < 0.5
    own, coordinator = cluster.name_process(leader), cluster.name_process(cluster.coordinator)
    episode.lose(victim)
    with (
        cluster.proxies[leader].cut_off(cluster.name_process(standby), coordinator if with_coordinator else None),
        cluster.proxies[standby].cut_off(own),
        cluster.coordinator_proxy.cut_off(own if with_coordinator else None),
    ):
        episode.sleep_briefly_or_long()
    episode.lose(victim)


# ------------------------------------------------------------------ in the middle of a fail-over


@standby_fault("coordinator killed in a fail-over")
def _kill_coordinator(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    coordinator = episode.child("coordinator")
    episode.arm(coordinator, f"{episode.chance.choice(_PROMOTION)}=kill")
    episode.kill(victim, leader)
    return episode.wait_for_death("coordinator", coordinator, DYING_SECONDS)


@standby_fault("pserver stops, and dies or continues in its fail-over")
def _lose_leader(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    coordinator = episode.child("coordinator")
    episode.arm(coordinator, f"{episode.chance.choice(_PROMOTION)}=stop")
    episode.lose(victim)
    with stopped(leader):
        has_stopped = wait_for_stop(episode, coordinator)
        if episode.chance.random() < 0.5:
            episode.kill(victim, leader)
    continue_coordinator(episode, coordinator)
    episode.lose(victim)
    return has_stopped


def continue_coordinator(episode: Episode, coordinator: Child) -> None:
    coordinator.signal(signal.SIGCONT)
    episode.arm(coordinator, "")


@standby_fault("standby killed in a fail-over")
def _lose_standby(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    """Kill a standby after the fence or after its registration; or let it die while it becomes the pserver."""
    name = f"standby of {victim}"
    if episode.chance.random() < 0.5:
        episode.arm(standby, f"{episode.chance.choice(CHANGE_FAILPOINTS)}=kill")
        episode.kill(victim, leader)
        return episode.wait_for_death(name, standby, DYING_SECONDS)
    coordinator = episode.child("coordinator")
    episode.arm(coordinator, f"{episode.chance.choice(_PROMOTION[1:])}=stop")
    episode.kill(victim, leader)
    has_stopped = wait_for_stop(episode, coordinator)
    episode.kill(name, standby)
    continue_coordinator(episode, coordinator)
    return has_stopped
