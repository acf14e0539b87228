"""One history: a cluster, faults at random times, and an end that all trainers reach."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM, SIGUSR1
from typing import Any, TypeVar

import httpx
import psutil
import safetensors.torch

from ps_protocol.errors import GradpostError
from trainer_client.testing import Child

from . import grey_faults, standby_faults  # noqa: F401 - they add their kinds to FAULTS
from .chaos_cluster import ChaosCluster, ChaosStandbys
from .diary import Reader
from .faults import FAULTS, Fault
from .model import EXPELLED, History, find_violations
from .proxy import Proxy
from .setup import LEASE_SECONDS, PARAMETERS, ROUND_TIMEOUT_SECONDS, Setup, write_whole
from .watch import Watch

T = TypeVar("T")

TICK_SECONDS = 0.05
START_SECONDS = 90.0
ANSWER_SECONDS = 10.0  # for the coordinator to list the checkpoints
END_SECONDS = 120.0  # after the last fault is healed; then a process waits for ever
RECOVERY_SECONDS = 20.0  # after which a fault that is healed has no effect any more
STOP_GRACE_SECONDS = 30.0  # for a pserver to end after SIGTERM
LAST_FAULT_SECONDS = 3 * END_SECONDS  # for the one that comes after all others
FIRST_STEPS = 5
LAST_STEPS = 10  # after the newest one that was begun when the end is fixed
PAUSE_SECONDS = (0.7, 2.5)  # between two faults
POLL_SECONDS = 0.2


@dataclass
class Injection:
    """One fault that was injected."""

    kind: str
    victim: str
    at: float
    healed_at: float = float("inf")


class Episode:
    """A history and its violations. Faults run in their own threads and call most methods."""

    def __init__(
        self, setup: Setup, folder: Path, *, kinds: Collection[str] = tuple(FAULTS), sabotage: str | None = None
    ) -> None:
        self.setup = setup
        self.folder = folder
        self.state = folder / "state"
        self._own = threading.local()  # a thread's own chance, so that no other thread's draws change it
        self._own.chance = random.Random(f"faults {setup.seed}")
        self.injections: list[Injection] = []
        self.violations: list[str] = []
        self.reader = Reader(folder)
        self.rounds = 0
        self.num_restorable = 0  # listed checkpoints that were read and complete
        self._sabotage = sabotage
        fitting = [fault for fault in FAULTS.values() if fault.kind in kinds and fault.fits(setup)]
        self._kinds = [fault for fault in fitting if not fault.is_last]
        self._last = [fault for fault in fitting if fault.is_last]
        self._stops: dict[int, int] = {}  # by rank: the last step
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._claimed: set[tuple[str, str]] = set()  # role and victim of the faults that are under way
        self._condemned: set[int] = set()  # processes that are to die
        self.history = History(setup, self.reader.records)
        self._spoiled: set[Path] = set()
        self.may_damage = True  # once; two damages may lose more than is promised
        self._done: set[int] = set()
        self._log = (folder / "services.log").open("w")

    def run(self) -> None:
        """Run the history, and find its violations."""
        (self.folder / "setup.json").write_text(json.dumps(asdict(self.setup)))
        self.cluster = ChaosCluster(self.setup, self.folder, sabotage=self._sabotage, on_line=self._line)
        try:
            with self.cluster:
                self._standbys = ChaosStandbys(self.cluster, self.note)
                self._standbys.start()
                for rank in range(self.setup.num_trainers):
                    self.cluster.start_rank(rank)
                http = self.cluster.connect(seconds=ANSWER_SECONDS)
                watch = Watch(self.setup, self.state, http, self.complain, self._spoiled)
                watching = threading.Thread(target=watch.run, args=[self._over], name="watch")
                watching.start()
                try:
                    self._live()
                finally:
                    self._over.set()
                    for thread in (watching, *self._threads):
                        thread.join()
                    self.num_restorable = watch.num_restorable
        finally:
            self.reader.read()
            self._log.close()
        self.violations += find_violations(self.history)
        self.rounds = max((record["round"] for record in self.reader.records if "blocks" in record), default=0)
        (self.folder / "injections.json").write_text(json.dumps([asdict(one) for one in self.injections], indent=1))

    def _live(self) -> None:
        """Inject faults until the end, or until the first violation, which later ones would only hide."""
        ranks = range(self.setup.num_trainers)
        if not self._wait_until(lambda: all(self.newest("end", r) >= FIRST_STEPS for r in ranks), START_SECONDS):
            self.complain(f"nothing had begun within {START_SECONDS:g} s: {self._where()}")
            return
        deck = self._deal()
        until = time.monotonic() + self.setup.seconds
        while self._kinds and time.monotonic() < until and not self.violations:
            self._inject(next(deck))
            self._wait_until(lambda: False, self.chance.uniform(*PAUSE_SECONDS))
        healed = self._wait_until(self._are_healed, END_SECONDS)
        begun = {rank: self.newest("begin", rank) for rank in ranks}
        if not healed or not self._wait_until(lambda: self._have_moved_on(begun), END_SECONDS):
            self.complain(f"a trainer has waited for {END_SECONDS:g} s: {self._where()}")
            return
        for fault in self._last:
            self._inject(fault)
            self._wait_until(self._are_healed, LAST_FAULT_SECONDS)
        self._set_stop(ranks)
        if not self._wait_until(lambda: self._done.issuperset(ranks), END_SECONDS):
            self.complain(f"a trainer has not ended after {END_SECONDS:g} s: {self._where()}")
            return
        self._read_final()

    def _are_healed(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _set_stop(self, ranks: Iterable[int]) -> None:
        """Let these trainers end soon after the newest step that any has begun, unless their end is fixed."""
        stop = max(self.newest("begin", rank) for rank in range(self.setup.num_trainers)) + LAST_STEPS
        self._stops = {**dict.fromkeys(ranks, stop), **self._stops}
        write_whole(self.folder / "stop", json.dumps(self._stops))

    # ------------------------------------------------------------------ watching

    def _line(self, name: str, line: str) -> None:
        self._log.write(f"{time.monotonic():.3f} [{name}] {line}\n")
        self._log.flush()

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Supervise the cluster until this holds; return False after the time or at a violation."""
        until = time.monotonic() + seconds
        while True:
            self.reader.read()
            self._restart_the_dead()
            if condition():
                return True
            if time.monotonic() >= until or self.violations:
                return False
            time.sleep(TICK_SECONDS)

    def _restart_the_dead(self) -> None:
        for standby in self.cluster.standbys:
            if not standby.is_running:
                self._check_end(standby, "")
        self._standbys.check()
        pservers = [(f"pserver {index}", child) for index, child in enumerate(self.cluster.pservers)]
        others = [(child.name, child) for child in (self.cluster.coordinator, *self.cluster.trainers)]
        for name, child in [*others, *pservers]:
            role, _, number = name.partition(" ")
            if child.is_running or (role, name) in self._claimed:
                continue
            if role == "trainer":
                self._trainer_has_ended(child)
            elif child in self.cluster.services:  # else a fault has replaced it meanwhile
                self._check_end(child, "")
                if role == "coordinator" or not self._standbys.replace(int(number), child):
                    self.cluster.restart(child)

    def _trainer_has_ended(self, child: Child) -> None:
        rank = int(child.name.split()[1])
        if rank in self._done:
            return
        if child.exit_code == 0:
            self._done.add(rank)
            return
        self.reader.read()
        last = next((r for r in reversed(self.reader.records) if r["rank"] == rank), {})
        is_evicted = last.get("kind") == EXPELLED and self.setup.on_trainer_loss == "continue"
        if is_evicted and rank in self._stops:
            self._done.add(rank)  # the others may have ended without it by now
            return
        if not is_evicted:
            self._check_end(child, f" {last.get('kind', '')}: {last.get('text', '')}")
        self.cluster.start_rank(rank)

    def _check_end(self, child: Child, why: str) -> None:
        if child.pid not in self._condemned:
            self.complain(f"{child.name} has ended by itself, exit code {child.exit_code}{why}")

    def newest(self, what: str, rank: int) -> int:
        """Return the last round of which a trainer has recorded this; 0 if there is none."""
        return max((r["round"] for r in self.reader.records if r["what"] == what and r["rank"] == rank), default=0)

    def _have_moved_on(self, begun: dict[int, int]) -> bool:
        ended = {
            (r["rank"], r["life"]) for r in self.reader.records if r["what"] == "end" and r["round"] > begun[r["rank"]]
        }
        return all((rank, life) in ended for rank, life in enumerate(self.cluster.lives))

    def _where(self) -> str:
        try:
            status = self.cluster.status().model_dump_json()
        except Exception as error:  # the coordinator may be what does not answer
            status = repr(error)
        return f"{[(rank, self.newest('end', rank)) for rank in range(self.setup.num_trainers)]}; {status}"

    def _read_final(self) -> None:
        """Record the parameters of the services after all trainers have left."""
        last = next(record for record in reversed(self.reader.records) if "blocks" in record)
        blocks: dict[str, list[float]] = {}
        for parameter in PARAMETERS:
            if (content := self._read_parameter(parameter)) is None:
                return
            of_blocks = safetensors.torch.load(content)[parameter].view(self.setup.num_pservers, -1)
            for row, values in enumerate(of_blocks[:, : 2 * self.setup.num_trainers].tolist()):
                blocks[f"{parameter}.block{row}"] = [last["round"], *values]
        facts = {"round": last["round"], "attempt": last["attempt"], "blocks": blocks}
        self.reader.records.append({"what": "final", "at": time.monotonic(), **facts})

    def _read_parameter(self, name: str) -> bytes | None:
        """Return the safetensors file of a parameter, requested again while it is unavailable."""

        def read() -> bytes | None:
            with self.cluster.connect(seconds=END_SECONDS) as http:
                response = http.get(f"/v1/parameters/{name}")
            return response.content if response.is_success else None

        content = self.poll(read, END_SECONDS)
        if content is None:
            self.complain(f"the parameter {name!r} could not be read at the end: {self._where()}")
        return content

    # ------------------------------------------------------------------ injecting

    def _deal(self) -> Iterator[Fault]:
        """Yield all kinds of faults in a random order, repeatedly."""
        while True:
            yield from self.chance.sample(self._kinds, len(self._kinds))

    def _inject(self, fault: Fault) -> None:
        try:
            victim = self.choose(fault.role)
        except IndexError:
            return  # all of them have such a fault
        injection = Injection(fault.kind, victim, time.monotonic())
        chance = random.Random(f"fault {len(self._threads)} of {self.setup.seed}")

        def run() -> None:
            self._own.chance = chance
            may_fail_over = fault.role in ("link", "gateway") and self.setup.num_standbys > 0  # though no process dies
            if may_fail_over:
                self.lose(victim)
            try:
                if fault.inject(self, victim) is False:
                    self.note(f"{fault.kind} had no effect")
                    self.injections.remove(injection)
            except Exception as error:
                self.complain(f"the fault {fault.kind!r} could not be injected: {error!r}")
            if may_fail_over:
                self.lose(victim)
            self._claimed.discard((fault.role, victim))
            injection.healed_at = time.monotonic()

        thread = threading.Thread(target=run, name=fault.kind)
        self.injections.append(injection)
        self._threads.append(thread)
        self._claimed.add((fault.role, victim))
        self.note(f"{fault.kind}: {victim}")
        thread.start()

    def choose(self, role: str) -> str:
        """Return a process of this role without such a fault. Raises IndexError if there is none."""
        pservers = [f"pserver {index}" for index in range(self.setup.num_pservers)]
        names = {
            "trainer": [f"trainer {rank}" for rank in range(self.setup.num_trainers)],
            "coordinator": ["coordinator"],
            "administrator": ["coordinator"],
            "gateway": ["coordinator", *pservers],
        }.get(role, pservers)
        return self.chance.choice([name for name in names if (role, name) not in self._claimed])

    # ------------------------------------------------------------------ for faults

    @property
    def chance(self) -> random.Random:
        """The random numbers of the calling thread."""
        chance: random.Random = self._own.chance
        return chance

    def complain(self, text: str) -> None:
        """Record the first violation; later ones may follow from it."""
        if self.violations:
            return
        self.violations.append(text)
        self.note(f"VIOLATION {text}")

    def note(self, text: str) -> None:
        """Write a choice to the log of the history."""
        self._line("campaign", text)

    def sleep(self, least: float, most: float) -> None:
        """Wait for a random time, or until the history is over."""
        self._over.wait(self.chance.uniform(least, most))

    def sleep_briefly_or_long(self) -> None:
        """Wait for less than a lease, or for longer than a lease or the round time-out."""
        self.sleep(*self.chance.choice(((0.3, 2), (LEASE_SECONDS + 1, ROUND_TIMEOUT_SECONDS + 2))))

    def poll(self, find: Callable[[], T], seconds: float, pause_seconds: float = POLL_SECONDS) -> T | None:
        """Call `find` until it returns a result, and return that; None after this time or a violation.

        Errors of requests, and of processes that have ended, are no result.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.violations:
            with suppress(GradpostError, httpx.TransportError, psutil.Error):
                if found := find():
                    return found
            time.sleep(pause_seconds)
        return None

    def let_end(self, ranks: Sequence[int]) -> bool:
        """Let these trainers end, and wait for it; False if they do not in time."""
        self._set_stop(ranks)
        if self.poll(lambda: self._done.issuperset(ranks), END_SECONDS):
            return True
        self.complain(f"trainers {[*ranks]} have not ended after {END_SECONDS:g} s: {self._where()}")
        return False

    def expect_rollback(self) -> None:
        """Allow a rollback of the run from now on."""
        self.history.disk_damaged.append(time.monotonic())

    def is_quiet(self, since: float, *roles: str) -> bool:
        """Return whether the cluster has had no other faults since then, and time before to recover from them.

        Faults of these roles, and of the kind that calls this, do not count.
        """
        own = threading.current_thread().name
        others = [one for one in self.injections if one.kind != own and FAULTS[one.kind].role not in roles]
        return all(injection.healed_at < since - RECOVERY_SECONDS for injection in others)

    def has_stepped_since(self, at: float) -> bool:
        """Return whether a trainer has ended a step after this time."""
        return any(record["what"] == "end" and record["at"] > at for record in reversed(self.reader.records))

    def child(self, name: str) -> Child:
        """Return the newest process of this name."""
        role, _, number = name.partition(" ")
        if role == "coordinator":
            return self.cluster.coordinator
        return (self.cluster.trainers if role == "trainer" else self.cluster.pservers)[int(number)]

    def proxy(self, victim: str) -> Proxy:
        """Return the proxy of a service."""
        if victim == "coordinator":
            return self.cluster.coordinator_proxy
        return self.cluster.proxies[self.child(victim)]

    def lose(self, name: str) -> None:
        """Record that this process, or one of this role, may be lost with its memory."""
        self.history.lost.setdefault(name, []).append(time.monotonic())

    def kill(self, victim: str, child: Child | None = None, *, may_report: bool = False) -> None:
        """Kill a process, by default the newest one of this name, and wait for its end.

        `may_report`: half of the times the coordinator receives a report, if a standby may replace the process.
        """
        child = child or self.child(victim)
        self._condemned.add(child.pid)
        self.lose(victim)
        child.signal(SIGKILL)
        child.wait(10)
        if may_report and self.setup.num_standbys and victim.startswith("pserver") and self.chance.random() < 0.5:
            with suppress(GradpostError):
                self.cluster.report_end(int(victim.split()[1]), child)

    def terminate(self, victim: str) -> None:
        """Send SIGTERM, which must end the process with exit code 0, unless an armed failpoint may end it."""
        child = self.child(victim)
        # A process that does not serve may not know the signal yet.
        must_end_well = self.cluster.find_address(child) and child.pid not in self._condemned
        self._condemned.add(child.pid)
        self.lose(victim)
        child.signal(SIGTERM)
        if (code := child.wait_or_kill(STOP_GRACE_SECONDS)) != 0 and must_end_well:
            self.complain(f"{victim} ended with exit code {code} after SIGTERM")

    def start(self, victim: str, *, may_die: bool = True, **env: Any) -> Child:
        """Start a service again with failpoints, at which it may be expected to die."""
        if victim == "coordinator":
            child = self.cluster.restart_coordinator(**env)
        else:
            child = self.cluster.start_pserver(int(victim.split()[1]), **env)
        if may_die:
            self._condemned.add(child.pid)
        return child

    def arm(self, child: Child, failpoint: str) -> None:
        """Arm a failpoint of a service that serves, and no other; an empty one disarms it."""
        if "kill" in failpoint:
            self._condemned.add(child.pid)
        self.note(f"{child.name} (pid {child.pid}): {failpoint or 'no failpoint'}")
        write_whole(self.folder / f"failpoints of {child.pid}", failpoint)
        child.signal(SIGUSR1)

    def wait_for_death(self, victim: str, child: Child, seconds: float) -> bool:
        """Return whether a process ends at its failpoint within this time. It is killed otherwise."""
        begin = time.monotonic()
        child.wait_or_kill(seconds)
        self.lose(victim)
        return time.monotonic() - begin < seconds

    def order(self, victim: str, **order: Any) -> None:
        """Give a trainer an order for its next step."""
        rank = int(victim.split()[1])
        with (self.folder / f"orders-{rank}").open("a") as file:
            file.write(json.dumps(order) + "\n")

    def damage(self, path: Path, content: bytes, *, loses_rounds: bool) -> None:
        """Replace a file's content by a damaged one."""
        self.may_damage = False
        if loses_rounds:
            self.expect_rollback()
        self.note(f"damaged {path.name}")
        self._spoiled.add(path)
        path.write_bytes(content)
