"""The faults of processes that live but do not work, of a disk in a fail-over, and of what several processes share.

A standby is in sync in most of them, so that training has to continue within seconds.
"""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from signal import SIGCONT
from typing import TYPE_CHECKING

import httpx

from ps_protocol import routes
from ps_protocol.errors import GradpostError
from trainer_client.testing import Child

from .faults import (
    CHANGE_SECONDS,
    DISK_ERRORS,
    PATIENCE_SECONDS,
    STANDSTILL_SECONDS,
    ask_until,
    check_steps,
    fault,
    list_checkpoints,
)
from .setup import LEASE_SECONDS, ROUND_TIMEOUT_SECONDS, ordered
from .standby_faults import (
    continue_coordinator,
    find_standbys,
    has_standbys,
    may_continue_alone,
    standby_fault,
    wait_for_stop,
)

if TYPE_CHECKING:
    from .episode import Episode


REPLACED_SECONDS = 12.0  # for a standby to replace a pserver: a lease, a limit of 2 s, and a busy machine
STALL_SECONDS = 3.0
NUM_STALLS = 6
MAX_STALLS_IN_SYNC = 4  # of these, which hold up rounds; with ever longer waits it is in sync at 0, 6, 18 and 30 s
MIN_STALLED_ROUNDS = 10  # in each stall: while other faults hold up the run, the standby has nothing to be late with
ROTATION_SECONDS = 1.5  # for services to read changed tokens


def _check_replaced(episode: Episode, victim: str, leader: Child, why: str) -> bool:
    """Wait until another process is the pserver, and complain if none is in time. Return False if other faults hid it.

    A fault that must have this violation has no effect then.
    """
    began, index, cluster = time.monotonic(), int(victim.split()[1]), episode.cluster

    def is_replaced() -> bool:
        addresses = {pserver.address for pserver in cluster.status().pservers if pserver.index == index}
        return bool(addresses) and cluster.find_address(leader) not in addresses

    if episode.poll(is_replaced, REPLACED_SECONDS):
        return True
    if is_quiet := episode.is_quiet(began):
        episode.complain(f"{victim}, {why}, was not replaced within {REPLACED_SECONDS:g} s")
    return is_quiet


def _disturb(episode: Episode, victim: str, leader: Child, disturbed: AbstractContextManager[None], why: str) -> bool:
    """Disturb a pserver for as long as another process has to become the pserver."""
    episode.lose(victim)
    with disturbed:
        is_checked = _check_replaced(episode, victim, leader, why)
    episode.lose(victim)
    return is_checked


def _cut_off(episode: Episode, child: Child) -> AbstractContextManager[None]:
    """Cut a process off from the coordinator within the block. The coordinator still reaches the process."""
    return episode.cluster.coordinator_proxy.cut_off(episode.cluster.name_process(child), directions=["up"])


@standby_fault("hanging log")
def _hang_log(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    hanging = ordered([episode.cluster.log_file(leader)], "hang")
    return _disturb(episode, victim, leader, hanging, "whose log hangs")


@standby_fault("one-way partition of a pserver")
def _cut_off_pserver(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    return _disturb(episode, victim, leader, _cut_off(episode, leader), "which does not reach the coordinator")


@standby_fault("one-way partition of a standby")
def _cut_off_standby(episode: Episode, victim: str, leader: Child, standby: Child) -> None:
    began = time.monotonic()
    with _cut_off(episode, standby):
        episode.sleep(LEASE_SECONDS + 1, ROUND_TIMEOUT_SECONDS + 4)
        check_steps(episode, began, f"the standby of {victim} did not reach the coordinator")


@standby_fault("pserver and place of checkpoints lost")
def _lose_place_too(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    order, began = episode.chance.choice(("hang", "eio")), time.monotonic()
    episode.note(order)
    with ordered([episode.cluster.place_file(victim)], order):
        episode.kill(victim, leader, may_report=True)
        episode.sleep(REPLACED_SECONDS, REPLACED_SECONDS)
        text = f"the pserver was lost with the place of checkpoints, which did this: {order}"
        return check_steps(episode, began, text)


@standby_fault("stalling standby", may_continue_alone)
def _stall(episode: Episode, victim: str, leader: Child, standby: Child) -> None:
    """Let the log of a standby hang for every other few seconds. It may not hold up rounds each time."""
    index, address, num_in_sync = int(victim.split()[1]), episode.cluster.find_address(standby), 0
    seen: list[tuple[int, int]] = []  # attempts, each of which begins without the back-off, and rounds
    for _ in range(NUM_STALLS):
        with suppress(GradpostError):
            status = episode.cluster.status()
            num_in_sync += address in find_standbys(status, index)
            seen.append((status.attempt, status.round))
        with ordered([episode.cluster.log_file(standby)], "hang"):
            episode.sleep(STALL_SECONDS, STALL_SECONDS)
        episode.sleep(STALL_SECONDS, STALL_SECONDS)
    is_same = len(seen) == NUM_STALLS and seen[-1][0] == seen[0][0]
    is_going = all(after - before >= MIN_STALLED_ROUNDS for (_, before), (_, after) in pairwise(seen))
    if num_in_sync > MAX_STALLS_IN_SYNC and is_same and is_going:
        text = f"the standby of {victim} was in sync at the beginning of {num_in_sync} of {NUM_STALLS} stalls"
        episode.complain(f"{text}, {MAX_STALLS_IN_SYNC} at most are allowed")


@standby_fault("disk error in a promotion")
def _fail_promotion(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    """Lose a pserver with its disk, and let the disk of the standby fail once while it becomes the pserver."""
    coordinator, folder = episode.child("coordinator"), episode.cluster.find_folder(leader)
    episode.arm(coordinator, "promote.before=stop")
    episode.kill(victim, leader)
    has_stopped = wait_for_stop(episode, coordinator) and folder is not None
    if has_stopped:
        shutil.rmtree(folder)
        episode.arm(standby, f"checkpoint.rename={episode.chance.choice(DISK_ERRORS)}")
    continue_coordinator(episode, coordinator)
    _check_replaced(episode, victim, leader, "which has ended")
    return has_stopped


@standby_fault("tokens reach a standby late")
def _rotate_tokens(episode: Episode, victim: str, leader: Child, standby: Child) -> None:
    """Rotate the tokens twice before a standby receives them: for a while the coordinator refuses its token."""
    with episode.cluster.keep_tokens(standby):
        for _ in range(2):
            episode.cluster.rotate_tokens()
            episode.sleep(ROTATION_SECONDS, ROTATION_SECONDS)
        episode.sleep(0.5, LEASE_SECONDS)


@standby_fault("zombie writer", lambda setup: has_standbys(setup) and setup.checkpoint_rounds == 50)
def _wake_writer(episode: Episode, victim: str, leader: Child, standby: Child) -> bool:
    """Stop a pserver that publishes its part of a checkpoint, until its successor has published the same round.

    The successor makes this checkpoint once the run has gone back to the one before.
    """
    listed = list_checkpoints(episode)
    episode.poll(lambda: list_checkpoints(episode) != listed, PATIENCE_SECONDS)  # so that none is being written
    folder = episode.cluster.find_folder(leader)
    episode.arm(leader, "checkpoint.shard=stop")
    episode.lose(victim)
    if not wait_for_stop(episode, leader) or folder is None:
        episode.arm(leader, "")  # another fault may have made it a standby, which would stop once it leads again
        leader.signal(SIGCONT)
        return False
    round_ = max(int(path.name.partition("-")[0]) for path in (folder / "log").glob("*.safetensors"))
    _check_replaced(episode, victim, leader, "which is stopped")
    episode.expect_rollback()
    before = {"round": max(listed for listed in list_checkpoints(episode) if listed < round_)}
    ask_until(episode, (200,), "POST", routes.ROLL_BACK, before)

    def find_newest() -> int | None:
        newest = max(list_checkpoints(episode))
        return newest if newest >= round_ else None

    newest = episode.poll(find_newest, PATIENCE_SECONDS)
    leader.signal(SIGCONT)
    if newest != round_:  # another fault has kept this checkpoint from being written
        return False
    episode.lose(victim)
    episode.sleep(STALL_SECONDS, STALL_SECONDS)  # for the watch to read the checkpoint again
    return True


@fault("copy by a reader", "coordinator", lambda setup: not setup.num_standbys)
def _copy_shard(episode: Episode, victim: str) -> bool:
    cluster, index = episode.cluster, episode.chance.randrange(episode.setup.num_pservers)
    query = {"run": cluster.status().run, "attempt": max(record.get("attempt", 0) for record in episode.reader.records)}
    with cluster.connect(seconds=CHANGE_SECONDS, address=cluster.find_address(cluster.pservers[index])) as http:
        try:
            episode.note(f"copy: {http.get(routes.SHARD_COPY, params=query).status_code}")
        except httpx.TransportError:  # an earlier fault has ended the pserver meanwhile
            return False
    began = time.monotonic()
    episode.kill(victim)
    episode.sleep(LEASE_SECONDS + STANDSTILL_SECONDS, LEASE_SECONDS + STANDSTILL_SECONDS + 2)
    return check_steps(
        episode, began, f"the coordinator was away, after a reader had copied the shard of pserver {index}"
    )
