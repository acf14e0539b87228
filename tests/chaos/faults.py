"""The faults of a cluster: their requirements, injection and healing.

A fault is a function of an episode and its victim. It runs in its own thread, and is healed when it returns; then the
episode restarts dead processes. `docs/reliability.md` has the guarantees.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import httpx

from ps_protocol import routes

from .chaos_cluster import find_libfaketime, stopped
from .proxy import ALL_CLIENTS, Direction
from .setup import FREEZABLE, LEASE_SECONDS, ROUND_TIMEOUT_SECONDS, Setup, ordered, write_whole

if TYPE_CHECKING:
    from .episode import Episode

Role = Literal["trainer", "pserver", "coordinator", "link", "gateway", "place", "administrator"]
Inject: TypeAlias = "Callable[[Episode, str], bool | None]"

DYING_SECONDS = 12.0  # for a process to reach the failpoint that is armed
RIVAL_SECONDS = 40.0  # for a second process to be refused
STANDSTILL_SECONDS = 3.0  # without any step, while nothing is disturbed that a step needs
LATE_SECONDS = 0.5  # that a trainer takes longer for a step than the others
LOG_ORDER = "slow 0.05"  # to logs, so that changes begin while a round is being applied
HURRY_SECONDS = 3.0  # during which trainers compute nothing, and push without a pause
# Requests of an administrator.
QUIET_SECONDS = 10.0  # for an answer while nothing else is disturbed
CHANGE_SECONDS = 45.0  # otherwise: the coordinator's own 30 s, a pause of it, and a busy machine
CHECKPOINT_SECONDS = 120.0  # for a checkpoint while the coordinator is restarted, or places are disturbed
PATIENCE_SECONDS = 120.0  # for a request that is sent again
ALLOWED = (200, 404, 409, 503)
DISK_ERRORS = ("enospc", "eio", "erofs")


@dataclass(frozen=True)
class Fault:
    """One kind of fault. Its victim has no other fault of that role meanwhile.

    `inject` returns False if it had no effect, and then it does not count.
    """

    kind: str
    role: Role
    inject: Inject
    fits: Callable[[Setup], bool]
    is_last: bool = False  # injected once, after all others


FAULTS: dict[str, Fault] = {}


def fault(
    kind: str, role: Role, fits: Callable[[Setup], bool] = lambda setup: True, *, is_last: bool = False
) -> Callable[[Inject], Inject]:
    def register(inject: Inject) -> Inject:
        FAULTS[kind] = Fault(kind, role, inject, fits, is_last)
        return inject

    return register


# ------------------------------------------------------------------ processes die


def _kill(episode: Episode, victim: str, *, max_seconds: float) -> None:
    episode.kill(victim, may_report=True)
    episode.sleep(0, max_seconds)


for _role, _seconds in (("trainer", 1), ("pserver", 2), ("coordinator", 3)):
    fault(f"{_role} killed", _role)(partial(_kill, max_seconds=_seconds))


@fault("pserver away for longer than the round time-out", "pserver")
def _keep_away(episode: Episode, victim: str) -> None:
    late = episode.chance.randrange(episode.setup.num_trainers)
    episode.order(f"trainer {late}", do="hang", seconds=LATE_SECONDS)  # the others wait for it when the pserver dies
    episode.sleep(LATE_SECONDS / 2, LATE_SECONDS)
    episode.kill(victim)
    episode.sleep(ROUND_TIMEOUT_SECONDS + 1, ROUND_TIMEOUT_SECONDS + 4)


@fault("trainer and pserver killed together", "pserver")
def _kill_two(episode: Episode, victim: str) -> None:
    episode.kill(victim)
    with suppress(IndexError):  # all of them have a fault
        episode.kill(episode.choose("trainer"))


@fault("coordinator and pserver killed together", "pserver")
def _kill_coordinator_too(episode: Episode, victim: str) -> None:
    episode.kill("coordinator")
    episode.kill(victim)
    episode.sleep(0, 1)


def _fail_at(
    episode: Episode, victim: str, *, names: Sequence[str], actions: Sequence[str] = ("kill",), most: int = 1
) -> bool:
    """Start a service again that will die, or fail once, at one of these failpoints: at the `most`th time or before."""
    name, action = episode.chance.choice(names), episode.chance.choice(actions)
    failpoint = f"{name}={action}@{episode.chance.randint(1, most)}"
    episode.kill(victim)
    episode.note(failpoint)
    # A pserver that cannot persist its identity ends; other errors must not end it.
    dies = action == "kill"
    may_die = dies or "rename" in name or episode.setup.num_standbys > 0  # a standby may have replaced it
    child = episode.start(victim, may_die=may_die, GRADPOST_FAILPOINTS=failpoint)
    with suppress(IndexError):
        if name.startswith("decide"):
            episode.kill(episode.choose("trainer"))  # so that there is a change to decide
    return not dies or episode.wait_for_death(victim, child, DYING_SECONDS)


_LOG, _APPLY = ("log.append.before", "log.append.after"), ("apply.before", "apply.after")
CHANGE_FAILPOINTS = ("freeze.before", "freeze.after", "open.before", "open.after", "install.before", "install.after")
_CHECKPOINT = ("checkpoint.rename", "checkpoint.shard")
for _kind, _service, _how in (
    ("pserver dies while it logs or applies", "pserver", {"names": _LOG + _APPLY, "most": 20}),
    ("pserver dies in a checkpoint", "pserver", {"names": _CHECKPOINT}),
    ("pserver dies in a change of members", "pserver", {"names": CHANGE_FAILPOINTS}),  # its own return is a change
    ("coordinator dies in a change of members", "coordinator", {"names": ("decide.before", "decide.after"), "most": 2}),
    ("coordinator dies at a manifest", "coordinator", {"names": ("checkpoint.manifest", "checkpoint.manifest.after")}),
    (
        "disk full, failing or read-only while logging",
        "pserver",
        {"names": _LOG[:1], "actions": DISK_ERRORS, "most": 20},
    ),
    ("disk full, failing or read-only in a checkpoint", "pserver", {"names": _CHECKPOINT, "actions": DISK_ERRORS}),
):
    fault(_kind, _service)(partial(_fail_at, **_how))


@fault("rolling restart", "pserver")
def _restart(episode: Episode, victim: str) -> None:
    episode.terminate(victim)


# ------------------------------------------------------------------ processes stand still


def _pause(episode: Episode, victim: str) -> None:
    episode.lose(victim)
    with stopped(episode.child(victim)):
        episode.sleep(0.2, LEASE_SECONDS + 2)
    episode.lose(victim)


for _role in ("trainer", "pserver", "coordinator"):
    fault(f"{_role} paused", _role)(_pause)


@fault("trainer hangs while its heartbeats live", "trainer")
def _hang(episode: Episode, victim: str) -> None:
    seconds = episode.chance.choice((0.5, ROUND_TIMEOUT_SECONDS + 2.5))
    episode.lose(victim)
    episode.order(victim, do="hang", seconds=seconds)
    episode.sleep(seconds, seconds)


# ------------------------------------------------------------------ the network


@fault("response lost after the upload", "link")
def _lose_reply(episode: Episode, victim: str) -> None:
    episode.proxy(victim).num_lost_replies += episode.chance.randint(1, 3)


@fault("connections reset", "link")
def _reset(episode: Episode, victim: str) -> None:
    for _ in range(episode.chance.randint(1, 4)):
        episode.proxy(victim).reset()
        episode.sleep(0, 0.2)


@fault("slow link", "link")
def _slow_down(episode: Episode, victim: str) -> None:
    proxy = episode.proxy(victim)
    proxy.delay_seconds = episode.chance.uniform(0.01, 0.1)
    episode.sleep(1, 4)
    proxy.delay_seconds = 0.0


@fault("proxy answers pages", "gateway")
def _answer_pages(episode: Episode, victim: str) -> None:
    proxy = episode.proxy(victim)
    episode.lose("trainer")  # a trainer that cannot reach a service may be evicted
    proxy.page = episode.chance.choice((404, 502))
    proxy.reset()  # open connections get the page, too
    episode.sleep_briefly_or_long()
    proxy.page = None
    proxy.reset()


@fault("proxy cuts replies off", "gateway")
def _cut_replies_off(episode: Episode, victim: str) -> None:
    episode.proxy(victim).num_cut_replies += episode.chance.randint(1, 5)


def _cut_off(
    episode: Episode, victim: str, *, ways: Sequence[tuple[Direction, ...]], from_trainer: bool = False
) -> None:
    """Cut a pserver off in one of these ways, from all clients or from a trainer."""
    proxy = episode.proxy(victim)
    client = f"trainer {episode.chance.randrange(episode.setup.num_trainers)}" if from_trainer else ALL_CLIENTS
    episode.lose("trainer")  # a trainer that cannot reach a pserver may be evicted
    with proxy.cut_off(client, directions=episode.chance.choice(ways)):
        episode.sleep_briefly_or_long()
    if episode.chance.random() < 0.5:
        proxy.reset()  # else delayed bytes arrive now


_BOTH: list[tuple[Direction, ...]] = [("up", "down")]
fault("pserver cut off, both ways", "link")(partial(_cut_off, ways=_BOTH))
fault("pserver cut off, one way", "link")(partial(_cut_off, ways=[("up",), ("down",)]))
fault("trainer cut off from one pserver", "link")(partial(_cut_off, ways=_BOTH, from_trainer=True))


# ------------------------------------------------------------------ requests and gradients


def _order(episode: Episode, victim: str, *, trick: str) -> None:
    episode.order(victim, do=trick, times=5)


for _kind, _trick in (("duplicate requests", "twice"), ("late requests", "late"), ("bodies broken off", "truncated")):
    fault(_kind, "trainer")(partial(_order, trick=_trick))


# With a delay the refusal of one step also refuses the next, so it is skipped only.
@fault("NaN in a gradient", "trainer", lambda setup: setup.nonfinite == "skip_round" or not setup.max_delay)
def _nan(episode: Episode, victim: str) -> None:
    episode.order(victim, do="nan")


# ------------------------------------------------------------------ disks and clocks


def _disturb_place(episode: Episode, victim: str, actions: Sequence[str]) -> None:
    """Disturb the checkpoint store of one pserver, while training must continue."""
    file, action = episode.cluster.place_file(victim), episode.chance.choice(actions)
    episode.note(action)
    began = time.monotonic()
    with ordered([file], action):
        episode.sleep(0.5, ROUND_TIMEOUT_SECONDS + 4)
        check_steps(episode, began, f"the place of {victim} did this: {action}", "place")


def check_steps(episode: Episode, began: float, what: str, *roles: str) -> bool:
    """Complain if training has stood still. Return False if faults of other kinds and roles may be the reason."""
    at = time.monotonic() - STANDSTILL_SECONDS
    is_checked = at > began and episode.is_quiet(began, *roles)
    if is_checked and not episode.has_stepped_since(at):
        episode.complain(f"training stood still while {what}")
    return is_checked


for _how, _actions in (("slow", ("slow 0.2", "slow 1")), ("failing", DISK_ERRORS), ("hanging", ("hang",))):
    fault(f"place of one pserver {_how}", "place")(partial(_disturb_place, actions=_actions))


def _has_witness(episode: Episode) -> bool:
    """Return whether a living trainer has received the newest round that any has, and would report its loss."""
    ends = [record for record in episode.reader.records if record["what"] == "end"]
    newest = max(((record["attempt"], record["round"]) for record in ends), default=(0, 0))
    lives = {(r["rank"], r["life"]) for r in ends if (r["attempt"], r["round"]) == newest}
    trainers = enumerate(zip(episode.cluster.trainers, episode.cluster.lives, strict=True))
    return any((rank, life) in lives and child.is_running for rank, (child, life) in trainers)


@fault("log damaged", "pserver")
def _damage_log(episode: Episode, victim: str) -> bool:
    if not episode.may_damage:
        return False
    if (folder := episode.cluster.find_folder(episode.child(victim))) is None:
        return False  # the process has not opened it yet
    episode.kill(victim)
    log = max((folder / "log").glob("*.log"))
    content = bytearray(log.read_bytes())
    last = content.rfind(bytes.fromhex(log.stem.partition("-")[2]))  # record; later bytes do not count
    if last < 0:
        return False  # a checkpoint was made this moment
    if not _has_witness(episode):
        return False  # a damaged last record is like one that was never acknowledged
    if episode.chance.random() < 0.5:
        content[episode.chance.randrange(last + 32)] ^= 1 << episode.chance.randrange(8)
    else:
        del content[last + episode.chance.randrange(32) :]
    episode.damage(log, bytes(content), loses_rounds=True)
    return True


@fault("checkpoint damaged", "pserver")
def _damage_checkpoint(episode: Episode, victim: str) -> bool:
    if not episode.may_damage:
        return False
    episode.kill(victim)
    files = sorted(episode.state.glob(f"checkpoints/*/*/{victim.replace(' ', '-')}-of-*.safetensors"))
    if len(files) < 2:
        return False  # with the only one the shard would be gone
    content = bytearray(files[-1].read_bytes())
    content[episode.chance.randrange(len(content))] ^= 1 << episode.chance.randrange(8)
    episode.damage(files[-1], bytes(content), loses_rounds=False)
    return True


# With standbys the second process may be the next one.
@fault("two processes claim one shard", "pserver", lambda setup: not setup.num_standbys)
def _start_rival(episode: Episode, victim: str) -> bool:
    first = episode.child(victim)
    rival = episode.cluster.start_rival(int(victim.split()[1]))
    was_refused = rival.wait_or_kill(RIVAL_SECONDS) not in (0, -signal.SIGKILL)
    if first is not episode.child(victim) or not first.is_running:
        return False  # it has died, and the other took its place as it should
    if not was_refused:
        episode.complain(f"a second process for {victim} was not refused")
    return True


# ------------------------------------------------------------------ administrators


def ask(episode: Episode, method: str, path: str, message: Any = None, *, seconds: float = CHANGE_SECONDS) -> int:
    """Send a request to the coordinator, check its answer, and return the status; 0 if the coordinator has died."""
    began = time.monotonic()
    try:
        with episode.cluster.connect(seconds=seconds) as client:
            response = client.request(method, path, json=message)
    except httpx.TimeoutException:
        episode.complain(f"{method} {path} was not answered within {seconds:g} s")
        return 0
    except httpx.TransportError as error:
        episode.note(f"{method} {path}: {error!r}")
        return 0
    took = time.monotonic() - began
    episode.note(f"{method} {path} {message or ''}: {response.status_code} after {took:.2f} s: {response.text}")
    if response.status_code not in ALLOWED:
        episode.complain(f"{method} {path} was answered {response.status_code}: {response.text}")
    elif took > QUIET_SECONDS and episode.is_quiet(began, "administrator"):
        episode.complain(f"{method} {path} was answered after {took:.1f} s, though nothing else was disturbed")
    return response.status_code


def ask_until(
    episode: Episode, wanted: Collection[int], method: str, path: str, message: Any = None, **bound: float
) -> int:
    """Repeat a request until the answer is a wanted one, and return its status; 0 if there was none in time."""

    def ask_once() -> int | None:
        status = ask(episode, method, path, message, **bound)
        return status if status in wanted else None

    return episode.poll(ask_once, PATIENCE_SECONDS) or 0


def list_checkpoints(episode: Episode) -> list[int]:
    """Return the rounds of the checkpoints that the coordinator lists, once it knows of any; none if it is too long."""

    def list_once() -> list[int]:
        with episode.cluster.connect(seconds=CHANGE_SECONDS) as http:
            response = http.get(routes.CHECKPOINTS)
        return [one["round"] for one in response.json()] if response.is_success else []

    return episode.poll(list_once, PATIENCE_SECONDS) or []


@fault("administrative changes under load", "administrator")
def _administer(episode: Episode, victim: str) -> None:
    with ordered([episode.cluster.log_file(child) for child in episode.cluster.pservers], LOG_ORDER):
        _change(episode)


def _change(episode: Episode) -> None:
    for rank in range(episode.setup.num_trainers):
        episode.order(f"trainer {rank}", do="hurry", seconds=HURRY_SECONDS)
    change = episode.chance.choice(("rate", "freeze", "pause", "checkpoint", "evict"))
    if change == "rate":
        ask(episode, "PUT", routes.RATE, {"rate": 1.0})  # the rate that trainers push
        ask(episode, "PUT", routes.RATE, {"rate": None})
    elif change == "freeze":
        path = routes.FROZEN.replace("{name:path}", FREEZABLE)
        ask(episode, "PUT", path)
        ask(episode, "DELETE", path)
    elif change == "pause":
        ask(episode, "POST", routes.PAUSE)
        episode.sleep(0, ROUND_TIMEOUT_SECONDS + 1)
        if not ask_until(episode, (200,), "POST", routes.RESUME):
            episode.complain("a paused run could not be resumed")
    elif change == "checkpoint":
        ask(episode, "POST", routes.CHECKPOINTS, seconds=CHECKPOINT_SECONDS)
    elif episode.setup.on_trainer_loss == "continue":
        rank = episode.chance.randrange(episode.setup.num_trainers)
        episode.lose(f"trainer {rank}")
        ask(episode, "POST", routes.EVICT.replace("{rank}", str(rank)))


@fault("coordinator killed after trainers are done, then a rollback", "coordinator", is_last=True)
def _roll_back_after_done(episode: Episode, victim: str) -> None:
    ranks = range(episode.chance.randint(1, episode.setup.num_trainers - 1))
    place, goes_behind = episode.cluster.place_file("pserver 0"), episode.chance.random() < 0.7
    if goes_behind:
        write_whole(place, "eio")  # so that no checkpoint of a later round than theirs becomes complete
    if not episode.let_end(ranks):
        return
    episode.kill(victim)
    episode.start(victim, may_die=False)
    if not goes_behind:
        ask_until(episode, (200,), "POST", routes.CHECKPOINTS, seconds=CHECKPOINT_SECONDS)
    listed = list_checkpoints(episode)
    write_whole(place, "")
    if not listed:
        episode.complain("no checkpoint is listed after the coordinator was started again")
        return
    round_, done = episode.chance.choice(listed), max(episode.newest("done", rank) for rank in ranks)
    episode.note(f"trainers {[*ranks]} are done with round {done}; there are checkpoints of {listed}")
    episode.expect_rollback()
    status = ask_until(episode, (200, 404, 409), "POST", routes.ROLL_BACK, {"round": round_})
    if status == 200 and round_ < done and episode.setup.on_trainer_loss == "wait":
        episode.complain(f"the run was rolled back to round {round_}, though trainers were done with round {done}")


@fault("clock jumps", "coordinator", lambda setup: setup.fakes_time and find_libfaketime() is not None)
def _jump(episode: Episode, victim: str) -> None:
    for file in episode.folder.glob("clock of *"):
        write_whole(file, f"{episode.chance.choice((-86400, -60, 60, 86400)):+d}")
