"""The faults of a pserver and its standby, among them those in the middle of a fail-over.

All have the role of a pserver, so that a shard has one of them at a time. None of them may lose an acknowledged round.
"""

from __future__ import annotations

import shutil
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from ps_protocol.errors import GradpostError
from ps_protocol.messages import ClusterStatus
from trainer_client.testing import Child

from .faults import CHANGE_FAILPOINTS, DYING_SECONDS, PAUSE_SECONDS, fault
from .setup import LEASE_SECONDS, ROUND_TIMEOUT_SECONDS, Setup

if TYPE_CHECKING:
    from .episode import Episode

JOIN_SECONDS = 25.0  # for a standby to be ready to replace its pserver
ALONE_SECONDS = 8.0  # for a pserver to continue without its standby
_PROMOTION = ("fence.before", "promote.before", "promote.after")


def has_standbys(setup: Setup) -> bool:
    return setup.num_standbys > 0


def may_continue_alone(setup: Setup) -> bool:
    return has_standbys(setup) and setup.replica_loss == "continue"


def find_standbys(status: ClusterStatus, index: int) -> list[str]:
    """Return the addresses of the standbys that may replace a pserver."""
    return [one.address for one in status.standbys if one.follows == index and one.role == "in_sync" and one.run]


def find_replicas(episode: Episode, victim: str) -> tuple[Child, Child] | None:
    """Return the process of a pserver and that of a standby which may replace it, once there is one; else None."""
    index, cluster, until = int(victim.split()[1]), episode.cluster, time.monotonic() + JOIN_SECONDS
    while time.monotonic() < until and not episode.violations:
        with suppress(GradpostError):
            status = cluster.status()
            living = {cluster.find_address(c): c for c in [*cluster.pservers, *cluster.standbys] if c.is_running}
            leaders = [living[p.address] for p in status.pservers if p.index == index and p.address in living]
            standbys = [living[address] for address in find_standbys(status, index) if address in living]
            if leaders and standbys:
                return leaders[0], standbys[0]
        time.sleep(PAUSE_SECONDS)
    return None


def _wait_until_alone(episode: Episode, victim: str) -> bool:
    """Wait until a pserver has continued without its standby; return False if it does not in time."""
    index, until = int(victim.split()[1]), time.monotonic() + ALONE_SECONDS
    while time.monotonic() < until:
        with suppress(GradpostError):
            if not find_standbys(episode.cluster.status(), index):
                break
        time.sleep(PAUSE_SECONDS)
    alone_at = time.monotonic()
    while time.monotonic() < until + ALONE_SECONDS:
        if episode.has_stepped_since(alone_at):
            return True
        time.sleep(PAUSE_SECONDS)
    return False


def wait_for_stop(child: Child) -> bool:
    """Return whether a service stands still at its failpoint in time."""
    until = time.monotonic() + DYING_SECONDS
    with suppress(psutil.Error):
        while time.monotonic() < until:
            if psutil.Process(child.pid).status() == psutil.STATUS_STOPPED:
                return True
            time.sleep(PAUSE_SECONDS / 10)
    return False


@fault("standby lost", "pserver", has_standbys)
def _kill_standby(episode: Episode, victim: str) -> bool:
    if (found := find_replicas(episode, victim)) is None:
        return False
    episode.kill(f"standby of {victim}", found[1])
    episode.sleep(0, 2)
    return True


@fault("standby paused", "pserver", has_standbys)
def _pause_standby(episode: Episode, victim: str) -> bool:
    if (found := find_replicas(episode, victim)) is None:
        return False
    found[1].signal(signal.SIGSTOP)
    episode.sleep(0.2, LEASE_SECONDS + 2)
    found[1].signal(signal.SIGCONT)
    return True


@fault("pserver and standby killed together", "pserver", has_standbys)
def _kill_both(episode: Episode, victim: str) -> bool:
    if (found := find_replicas(episode, victim)) is None:
        return False
    episode.kill(victim, found[0], may_report=True)
    episode.sleep(0, 0.02)
    episode.kill(f"standby of {victim}", found[1])
    episode.sleep(0, 1)
    return True


@fault("pserver and its disk lost", "pserver", has_standbys)
def _lose_disk(episode: Episode, victim: str) -> bool:
    if (found := find_replicas(episode, victim)) is None:
        return False
    folder = episode.cluster.find_folder(found[0])
    episode.kill(victim, found[0], may_report=True)
    if folder is not None:
        shutil.rmtree(folder)
    episode.sleep(0, 2)
    return folder is not None


@fault("pserver killed after it continued alone", "pserver", may_continue_alone)
def _kill_alone(episode: Episode, victim: str) -> bool:
    if (found := find_replicas(episode, victim)) is None:
        return False
    leader, standby = found
    name, proxy = episode.cluster.name_process(standby), episode.cluster.proxies[leader]
    if episode.chance.random() < 0.5:
        episode.kill(f"standby of {victim}", standby)
    else:  # it lives, and must not be promoted
        proxy.blocked = proxy.blocked | {("up", name), ("down", name)}
    if is_alone := _wait_until_alone(episode, victim):
        episode.kill(victim, leader)
        episode.sleep(0, LEASE_SECONDS + 1)
    proxy.blocked = proxy.blocked - {("up", name), ("down", name)}
    return is_alone


@fault("pserver and standby cut off from each other", "pserver", has_standbys)
def _cut_off(episode: Episode, victim: str) -> bool:
    """Cut them off, and half of the times the pserver from the coordinator, too, while trainers reach both."""
    if (found := find_replicas(episode, victim)) is None:
        return False
    cluster, (leader, standby) = episode.cluster, found
    others = [standby] if episode.chance.random() < 0.5 else [standby, cluster.coordinator]
    names = [cluster.name_process(one) for one in others]
    own = cluster.name_process(leader)
    proxies = {cluster.proxies[leader]: names, cluster.proxies[standby]: [own]}
    if len(others) > 1:
        proxies[cluster.coordinator_proxy] = [own]
    episode.lose(victim)
    for proxy, clients in proxies.items():
        proxy.blocked = proxy.blocked | {(direction, client) for client in clients for direction in ("up", "down")}
    episode.sleep(*episode.chance.choice(((0.3, 2), (LEASE_SECONDS + 1, ROUND_TIMEOUT_SECONDS + 2))))
    for proxy, clients in proxies.items():
        proxy.blocked = {(direction, client) for direction, client in proxy.blocked if client not in clients}
    episode.lose(victim)
    return True


# ------------------------------------------------------------------ in the middle of a fail-over


@fault("coordinator killed in a fail-over", "pserver", has_standbys)
def _kill_coordinator(episode: Episode, victim: str) -> bool:
    if (found := find_replicas(episode, victim)) is None:
        return False
    coordinator = episode.child("coordinator")
    episode.arm(coordinator, f"{episode.chance.choice(_PROMOTION)}=kill")
    episode.kill(victim, found[0])
    return episode.wait_for_death("coordinator", coordinator, DYING_SECONDS)


@fault("pserver stops, and dies or continues in its fail-over", "pserver", has_standbys)
def _lose_leader(episode: Episode, victim: str) -> bool:
    if (found := find_replicas(episode, victim)) is None:
        return False
    coordinator, leader = episode.child("coordinator"), found[0]
    episode.arm(coordinator, f"{episode.chance.choice(_PROMOTION)}=stop")
    episode.lose(victim)
    leader.signal(signal.SIGSTOP)
    has_stopped = wait_for_stop(coordinator)
    if episode.chance.random() < 0.5:
        episode.kill(victim, leader)
    leader.signal(signal.SIGCONT)
    continue_coordinator(episode, coordinator)
    episode.lose(victim)
    return has_stopped


def continue_coordinator(episode: Episode, coordinator: Child) -> None:
    coordinator.signal(signal.SIGCONT)
    episode.arm(coordinator, "")


@fault("standby killed in a fail-over", "pserver", has_standbys)
def _lose_standby(episode: Episode, victim: str) -> bool:
    """Kill a standby after the fence or after its registration; or let it die while it becomes the pserver."""
    if (found := find_replicas(episode, victim)) is None:
        return False
    leader, standby = found
    name = f"standby of {victim}"
    if episode.chance.random() < 0.5:
        episode.arm(standby, f"{episode.chance.choice(CHANGE_FAILPOINTS)}=kill")
        episode.kill(victim, leader)
        return episode.wait_for_death(name, standby, DYING_SECONDS)
    coordinator = episode.child("coordinator")
    episode.arm(coordinator, f"{episode.chance.choice(_PROMOTION[1:])}=stop")
    episode.kill(victim, leader)
    has_stopped = wait_for_stop(coordinator)
    episode.kill(name, standby)
    continue_coordinator(episode, coordinator)
    return has_stopped
