"""The shell: decisions reach the pservers whatever goes wrong on the way, and waiting there does not stop the clock."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import (
    BadModel,
    GradpostError,
    NotReady,
    PserverLost,
    StalePserver,
    StaleRound,
    StorageFailed,
    TrainerLost,
    TryAgain,
)
from ps_protocol.messages import Freeze, FrozenRounds, InstallMembers, InstallRun, Message
from ps_protocol.routes import DECLARE_MODEL, FREEZE, JOIN_TRAINER, LEAVE, MEMBERS, REGISTER_PSERVER, RESTORABLE, RUN
from services.coordinator.app import make_coordinator_app
from services.coordinator.checkpointing import create_checkpoint
from services.coordinator.coordinator import Coordinator
from services.coordinator.record import ClusterRecord, RecordFile, RunRecord, TrainerRecord
from services.coordinator.run import Run
from services.coordinator.settings import CoordinatorSettings
from services.runtime.checkpoints import Manifest, write_manifest
from services.runtime.metrics import ServiceMetrics
from services.runtime.places import open_place

from .support import alive, beat, join_all, joining, leaving, model, registration

pytestmark = pytest.mark.asyncio

Answer = Callable[[InstallRun | InstallMembers], Any]


class FakePservers:
    """Their side of the control API; `answer` may refuse, hang, or lose the response of one of them."""

    def __init__(self) -> None:
        self.frozen: list[Freeze] = []
        self.taken: dict[str, list[InstallRun | InstallMembers]] = {"0": [], "1": []}
        self.answer: dict[str, Answer] = {}
        self.empty: set[str] = set()  # have lost what they held
        self.ranges = [[0, 4]]  # that everybody can restore
        self.pages: list[httpx.Response] = []  # of a proxy, before what they can restore
        self.short: set[str] = set()  # have lost the end of their logs

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        index = request.url.host
        if request.url.path == FREEZE:
            self.frozen.append(Freeze.model_validate_json(request.content))
            if index in self.empty:
                raise NotReady("it holds nothing of the run")
            rounds = FrozenRounds(applied=4, is_short=index in self.short)
            return httpx.Response(200, content=rounds.model_dump_json())
        if request.url.path == RESTORABLE and self.pages:
            return self.pages.pop()
        if request.url.path == RESTORABLE:
            return httpx.Response(200, json=self.ranges)
        if request.url.path not in (RUN, MEMBERS):
            return httpx.Response(404)
        kind = InstallRun if request.url.path == RUN else InstallMembers
        message: Any = kind.model_validate_json(request.content)
        if index in self.answer:
            await self.answer[index](message)
        self.taken[index].append(message)
        return httpx.Response(204)

    def told(self, index: str) -> list[tuple[str, str, int]]:
        return [(type(m).__name__, m.run, m.number) for m in self.taken[index]]


@asynccontextmanager
async def coordinating(pservers: FakePservers, **settings: Any) -> AsyncIterator[Coordinator]:
    async def handle(request: httpx.Request) -> httpx.Response:
        try:
            return await pservers(request)
        except GradpostError as error:
            return httpx.Response(error.status, content=json.dumps(error.to_problem()))

    folder = tempfile.mkdtemp()
    stop = asyncio.Event()
    options = {
        "num_pservers": 2, "num_trainers": 2, "lease_seconds": 0.4, "state_dir": Path(folder),
        "on_trainer_loss": "fail", "durability": "none", **settings,
    }  # fmt: skip
    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http, asyncio.TaskGroup() as tasks:
        coordinator = Coordinator(CoordinatorSettings(**options), http)
        tasks.create_task(coordinator.run(stop))
        try:
            yield coordinator
        finally:
            stop.set()
            coordinator.changed()
    shutil.rmtree(folder)


def begin(coordinator: Coordinator) -> list[tuple[int, str, int]]:
    now = coordinator.now()
    for index in (0, 1):
        coordinator.cluster.register_pserver(registration(str(index), index=index), now)
    joined = join_all(coordinator.cluster, now)
    coordinator.changed()
    return [(j.rank, j.run, j.incarnation) for j in joined]


async def eventually(condition: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what it looks at tells nobody
            await asyncio.sleep(0.005)


async def test_a_run_is_installed_everywhere_before_trainers_get_the_plan():
    pservers = FakePservers()
    free = asyncio.Event()

    async def wait(_: object) -> None:
        await free.wait()

    pservers.answer["1"] = wait
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        waiting = asyncio.create_task(coordinator.wait_for_plan(*trainer, 20))
        await eventually(lambda: len(pservers.taken["0"]) == 1)
        assert not waiting.done()
        assert coordinator.cluster.run.state == "gathering"
        free.set()
        ready = await asyncio.wait_for(waiting, 2)
        assert [p.index for p in ready.pservers] == [0, 1]
        assert pservers.told("0") == pservers.told("1") == [("InstallRun", trainer[1], 4)]


async def test_a_wait_for_the_plan_says_what_it_waits_for():
    async with coordinating(FakePservers()) as coordinator:
        coordinator.cluster.join_trainer(joining("a", 0), coordinator.now())
        run = coordinator.cluster.run.name
        with pytest.raises(NotReady, match="pserver 0, pserver 1, trainer 0 to declare its model, trainer 1"):
            await coordinator.wait_for_plan(0, run, 1, 0.01)


async def test_an_installation_whose_response_was_lost_is_repeated():
    pservers = FakePservers()
    lost: list[InstallRun | InstallMembers] = []

    async def lose(message: InstallRun | InstallMembers) -> None:
        if not lost:
            lost.append(message)
            pservers.taken["0"].append(message)
            raise httpx.ReadTimeout("lost")

    pservers.answer["0"] = lose
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        assert [kind for kind, _, _ in pservers.told("0")] == ["InstallRun", "InstallRun"]


async def test_a_pserver_that_does_not_know_yet_who_it_is_is_asked_again():
    """The installation may overtake the answer to its registration."""
    pservers = FakePservers()
    refusals = [StalePserver("this installation was meant for another life of this pserver")] * 2

    async def refuse(_: object) -> None:
        if refusals:
            raise refusals.pop()

    pservers.answer["1"] = refuse
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")


async def test_a_pserver_that_cannot_be_changed_for_long_ends_the_run_though_it_lives():
    pservers = FakePservers()
    tries = 0

    async def refuse(_: object) -> None:
        nonlocal tries
        tries += 1
        raise TryAgain("pserver 1 cannot open the state of the run: no space left on device")

    pservers.answer["1"] = refuse
    async with coordinating(pservers, lease_seconds=30, rejoin_timeout_seconds=0.5) as coordinator:
        [trainer, _] = begin(coordinator)
        with pytest.raises(PserverLost, match=r"no change could be carried out for 0\.5 s: .* no space left"):
            await asyncio.wait_for(coordinator.wait_for_plan(*trainer, 20), 5)
    assert tries > 1


async def test_a_pserver_that_cannot_serve_the_run_ends_it():
    pservers = FakePservers()

    async def refuse(message: object) -> None:
        if isinstance(message, InstallRun):
            raise BadModel("the shard does not fit into memory")

    pservers.answer["1"] = refuse
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        with pytest.raises(PserverLost, match=r"pserver 1 cannot serve the run: the shard does not fit"):
            await asyncio.wait_for(coordinator.wait_for_plan(*trainer, 20), 5)


async def test_a_failure_reaches_every_pserver_and_every_waiting_trainer():
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        coordinator.cluster.leave_trainer(1, leaving("failed", run=trainers[1][1], reason="no data"), coordinator.now())
        coordinator.changed()
        await eventually(lambda: all(len(taken) == 2 for taken in pservers.taken.values()))
        for taken in pservers.taken.values():
            assert isinstance(taken[1], InstallMembers)
            assert taken[1].failure is not None
            assert taken[1].failure["detail"] == "trainer 1 failed: no data"
        errors = await asyncio.gather(
            *(coordinator.wait_for_plan(*trainers[0], 5) for _ in range(2)), return_exceptions=True
        )
        assert [type(e) for e in errors] == [TrainerLost, TrainerLost]
        assert errors[0] is not errors[1]


async def test_leases_end_while_a_pserver_keeps_the_coordinator_waiting():
    pservers = FakePservers()

    async def hang(message: object) -> None:
        if isinstance(message, InstallMembers):
            await asyncio.sleep(1.5)

    pservers.answer["1"] = hang
    async with coordinating(pservers) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        run, cluster = trainers[0][1], coordinator.cluster
        cluster.leave_trainer(1, leaving(run=run), coordinator.now())  # pserver 1 is told, and hangs
        coordinator.changed()
        begun = coordinator.now()
        while cluster.run.failure is None:
            cluster.pserver_heartbeat(0, beat(run=run), coordinator.now())
            cluster.pserver_heartbeat(1, beat(run=run), coordinator.now())
            await asyncio.sleep(0.05)
        assert isinstance(cluster.run.failure, TrainerLost)  # trainer 0 has been silent
        assert coordinator.now() - begun < 1.2


async def test_a_pause_of_the_coordinator_is_nobodys_fault():
    """It could not hear the heartbeats: every lease begins anew, and then counts as ever."""
    async with coordinating(FakePservers()) as coordinator:
        begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        time.sleep(0.7)  # noqa: ASYNC251 - SIGSTOP, SIGCONT
        await asyncio.sleep(0.2)
        assert coordinator.cluster.run.failure is None
        await eventually(lambda: coordinator.cluster.run.failure is not None)


async def test_a_run_that_begins_in_the_middle_of_a_reconciliation_is_left_to_the_next():
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        cluster, now = coordinator.cluster, coordinator.now()
        for rank, run, incarnation in trainers:
            cluster.leave_trainer(rank, leaving(run=run, incarnation=incarnation), now)
        reconciling = asyncio.create_task(coordinator._installer.reconcile())
        await asyncio.sleep(0)  # it has seen the old run, and not begun to ask the pservers
        cluster.join_trainer(joining("next", 0), now)
        await reconciling
        assert cluster.run.name != trainers[0][1]
        assert {kind for kind, run, _ in pservers.told("0") if run == cluster.run.name} == set()


async def test_members_are_told_in_their_newest_state_only():
    pservers = FakePservers()
    free = asyncio.Event()

    async def wait(message: object) -> None:
        if isinstance(message, InstallMembers):
            await free.wait()

    pservers.answer["0"] = pservers.answer["1"] = wait
    async with coordinating(pservers, lease_seconds=30, num_trainers=3) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        for rank, run, incarnation in trainers[:2]:
            coordinator.cluster.leave_trainer(rank, leaving(run=run, incarnation=incarnation), coordinator.now())
            coordinator.changed()
            await asyncio.sleep(0.01)
        free.set()
        await eventually(lambda: pservers.taken["0"][-1].members == {2: 1} == pservers.taken["1"][-1].members)
        numbers = [number for _, _, number in pservers.told("0")]
        assert numbers == sorted(set(numbers))


async def test_a_checkpoint_needs_every_pserver():
    async with coordinating(FakePservers()) as coordinator:
        cluster = coordinator.cluster
        for index in range(2):
            cluster.register_pserver(registration(str(index), index=index), coordinator.now())
        join_all(cluster, coordinator.now())
        coordinator.changed()
        await coordinator.wait_until(lambda: cluster.run.state == "training", 5)
        assert cluster.run.state == "training"
        cluster.registry.members.clear()
        with pytest.raises(NotReady, match="needs every pserver"):
            await create_checkpoint(coordinator)


async def test_the_last_checkpoint_holds_what_pservers_have_taken_meanwhile(monkeypatch):
    """Asynchronous pushes that nobody waited for: they are applied after the trainer has gone."""
    asked: list[int] = []

    async def want(http: object, member: object, run: str, round_: int, *, is_over: bool) -> None:
        asked.append(round_)
        if round_ < 95:
            raise StaleRound("contribution 90 was taken before others", current=95)

    monkeypatch.setattr("services.coordinator.coordinator.want_checkpoint", want)
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        assert await coordinator._write_result(trainer[1], 90) == 95
        assert await coordinator._write_result(trainer[1], 95) is None
        assert asked == [90, 90, 95, 95]


async def test_a_place_that_hangs_holds_up_no_change_of_members(monkeypatch):
    """Neither that of a checkpoint's manifest, nor the end of the process."""
    pservers, is_let_go = FakePservers(), threading.Event()
    async with coordinating(pservers, lease_seconds=30, num_trainers=3, on_trainer_loss="continue") as coordinator:
        trainers = begin(coordinator)
        cluster, place = coordinator.cluster, coordinator.place
        await eventually(lambda: cluster.run.state == "training")
        is_asked = asyncio.Event()

        def hang(_: str) -> list[str]:
            coordinator_loop.call_soon_threadsafe(is_asked.set)
            is_let_go.wait(20)
            return []

        coordinator_loop = asyncio.get_running_loop()
        monkeypatch.setattr(place, "list", hang)
        for index in (0, 1):
            cluster.pserver_heartbeat(index, beat(run=cluster.run.name), coordinator.now())
        coordinator.changed()
        await asyncio.wait_for(is_asked.wait(), 5)
        rank, run, incarnation = trainers[2]
        cluster.leave_trainer(rank, leaving("failed", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        await eventually(lambda: all(taken[-1].members == {0: 1, 1: 1} for taken in pservers.taken.values()))
    assert not is_let_go.is_set()
    is_let_go.set()


class SlowFile:
    """Of the records it writes the first such one only when it may."""

    def __init__(self, coordinator: Coordinator, is_slow: Callable[[RunRecord], bool]) -> None:
        self.is_asked, self.may_write = threading.Event(), threading.Event()
        self.newest: RunRecord | None = None
        write = coordinator._file.write

        def write_slowly(record: ClusterRecord) -> None:
            if record.run is not None and is_slow(record.run):
                self.is_asked.set()
                assert self.may_write.wait(10)
            write(record)
            self.newest = record.run

        coordinator._file.write = write_slowly  # type: ignore[method-assign]


async def test_nobody_trains_before_the_disk_has_it_that_the_run_has_begun():
    """Another life of the coordinator would begin it anew, and pservers would forget what they have logged."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        file = SlowFile(coordinator, lambda run: run.state == "training")
        [trainer, _] = begin(coordinator)
        waiting = asyncio.create_task(coordinator.wait_for_plan(*trainer, 20))
        assert await asyncio.to_thread(file.is_asked.wait, 10)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        with pytest.raises(NotReady):
            await coordinator.wait_for_plan(*trainer, 0.01)
        file.may_write.set()
        assert (await waiting).start == 1
        assert file.newest is not None
        assert file.newest.state == "training"


async def test_nobody_hears_of_a_rollback_before_the_disk_has_it():
    """Trainers that followed would be ahead of another life of the coordinator."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, other] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        file, cluster = SlowFile(coordinator, lambda run: run.attempt == 1), coordinator.cluster
        pservers.empty.add("1")
        rank, run, incarnation = other
        cluster.leave_trainer(rank, leaving("failed", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        assert await asyncio.to_thread(file.is_asked.wait, 10)
        reply = cluster.trainer_heartbeat(0, alive(run=run), coordinator.now())
        assert (reply.attempt, reply.resume) == (0, 0)
        joining_again = asyncio.create_task(coordinator.keep())  # of another request: it must not undo the decision
        file.may_write.set()
        await joining_again
        await eventually(lambda: cluster.run.attempt == 1)
        reply = cluster.trainer_heartbeat(0, alive(run=run), coordinator.now())
        assert (reply.attempt, reply.resume) == (1, 4)
        assert file.newest is not None
        assert (file.newest.attempt, file.newest.resume) == (1, 4)


async def test_a_pserver_that_is_short_rounds_takes_everybody_back_though_nobody_else_knows_of_them():
    """All trainers who had pulled them may have died: else their next lives would take other steps in those rounds."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        pservers.short.add("0")
        pservers.pages += [
            httpx.Response(502, content=b"<h1>Bad Gateway</h1>"),
            httpx.Response(502, json={"message": "upstream connect error"}),
            httpx.Response(200, content=b"?"),
        ]
        coordinator.cluster.register_pserver(registration("0", index=0), coordinator.now())
        coordinator.cluster.run.number += 1
        coordinator.changed()
        await eventually(lambda: coordinator.cluster.run.attempt == 1)
        assert coordinator.cluster.run.resume == 4


@pytest.mark.parametrize(("round_", "attempt", "goes_back"), [(5, 0, True), (4, 0, False), (9, 1, False)])
async def test_what_a_trainer_has_ended_is_remembered_when_it_is_gone(round_, attempt, goes_back):
    """A pserver comes back without the newest round: its log was cut off, and the trainer that had it has died."""
    pservers = FakePservers()  # they have applied round 4
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        cluster = coordinator.cluster
        beat = alive(run=trainer[1], round_=round_).model_copy(update={"attempt": attempt})
        cluster.trainer_heartbeat(0, beat, coordinator.now())
        cluster.leave_trainer(0, leaving("failed", run=trainer[1]), coordinator.now())
        coordinator.changed()
        await eventually(lambda: all(len(taken) == 2 for taken in pservers.taken.values()))
        assert cluster.run.attempt == goes_back
        if goes_back:
            assert (cluster.run.resume, cluster.run.pulled) == (4, 0)


@pytest.mark.parametrize("has_trained", [True, False])
async def test_initial_values_do_not_do_once_a_round_was_ended(has_trained):
    """All pservers have lost their disks: what a trainer could send as initial values is what it has trained."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        cluster = coordinator.cluster
        cluster.trainer_heartbeat(0, alive(run=trainer[1], round_=5 * has_trained), coordinator.now())
        pservers.empty |= {"0", "1"}
        pservers.ranges = []
        cluster.run.number += 1
        coordinator.changed()
        await eventually(lambda: cluster.run.is_over or cluster.run.attempt == 1)
        assert isinstance(cluster.run.failure, PserverLost) == has_trained


async def test_one_coordinator_at_a_time_uses_a_folder(tmp_path):
    settings = CoordinatorSettings(state_dir=tmp_path)
    async with httpx.AsyncClient() as http:
        one, other = Coordinator(settings, http), Coordinator(settings, http)
        await one.recall()
        with pytest.raises(StorageFailed, match="another coordinator uses"):
            await other.recall()
        stop = asyncio.Event()
        stop.set()
        await one.run(stop)
        await other.recall()
        await other.run(stop)


async def recalled(folder: Path, **settings: Any) -> Coordinator:
    """A life of the coordinator that has taken up what the one before has left, and is gone again."""
    options = {"num_pservers": 2, "num_trainers": 2, "state_dir": folder, **settings}
    async with httpx.AsyncClient() as http:
        coordinator = Coordinator(CoordinatorSettings(**options), http)
        await coordinator.recall()
    coordinator._file.let_go()
    return coordinator


async def planned(folder: Path) -> Run:
    """A run whose plan was made, by a coordinator that is gone."""
    coordinator = await recalled(folder)
    begin(coordinator)
    assert coordinator.cluster.start_run_if_complete()
    await coordinator.keep()
    return coordinator.cluster.run


async def test_those_who_cut_the_model_alike_go_on_with_their_disks(tmp_path):
    run = await planned(tmp_path)
    assert (await recalled(tmp_path, resume=True)).cluster.run.name == run.name


@pytest.mark.parametrize("changes", [{"min_block_size": 10**6}, {"num_pservers": 3}, {"slice_parameters": False}])
async def test_those_who_cut_the_model_another_way_begin_with_a_checkpoint(tmp_path, changes):
    run = await planned(tmp_path)
    assert run.plan is not None
    manifest = Manifest(
        run="run0", attempt=0, round=7, consistency=Consistency(), plan=run.plan.to_json(), shards=(),
        created="2026-11-22T05:34:22Z",
    )  # fmt: skip
    write_manifest(open_place(str(tmp_path / "checkpoints")), manifest)
    for resume in (True, False, True):  # its next lives begin with it, too
        coordinator = await recalled(tmp_path, resume=resume, **changes)
        beginning = coordinator.cluster.beginning
        assert beginning is not None
        assert (beginning.run, beginning.round, coordinator.cluster.run.plan) == ("run0", 7, None)


async def test_a_resumption_that_has_failed_begins_with_the_same_checkpoint_next_time(tmp_path):
    """The run had a plan and had not begun: nothing of it is on any disk."""
    run = await planned(tmp_path)
    place = open_place(str(tmp_path / "checkpoints"))
    for name, round_ in (("run0", 7), ("another experiment", 9)):
        assert run.plan is not None
        manifest = Manifest(
            run=name, attempt=0, round=round_, consistency=Consistency(), plan=run.plan.to_json(), shards=(),
            created=f"2026-11-22T05:34:2{round_}Z",
        )  # fmt: skip
        write_manifest(place, manifest)
    coordinator = await recalled(tmp_path)
    run = coordinator.cluster.run
    run.resume, run.source = 7, "run0"
    run.fail(TrainerLost("somebody has pressed Ctrl-C", ranks=[0]), 1.0)
    await coordinator.keep()
    for _ in range(2):
        beginning = (await recalled(tmp_path, resume=True)).cluster.beginning
        assert beginning is not None
        assert (beginning.run, beginning.round) == ("run0", 7)


async def test_who_cannot_take_over_what_was_trained_does_not_begin_with_something_else(tmp_path):
    run = await planned(tmp_path)
    coordinator = await recalled(tmp_path)
    coordinator.cluster.run.has_trained = True
    await coordinator.keep()
    with pytest.raises(StorageFailed, match=f"run {run.name} has no checkpoint"):
        await recalled(tmp_path, resume=True, num_pservers=3)


async def test_a_run_that_is_to_begin_with_a_checkpoint_gathers_on(tmp_path):
    """Whoever has joined is known to the next life, whether that is told to resume or not."""
    for resume in (False, True, False):
        coordinator = await recalled(tmp_path, resume=resume)
        joined = coordinator.cluster.join_trainer(joining("a", 0), coordinator.now())
        await coordinator.keep()
        assert (joined.rank, joined.incarnation, joined.run) == (0, 1, coordinator.cluster.run.name)


async def test_where_a_newcomer_begins_is_nothing_that_it_has_ended():
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        run = coordinator.cluster.run
        run.membership.starts[0] = 7
        for round_, pulled in ((6, 0), (7, 7)):
            coordinator.cluster.trainer_heartbeat(0, alive(run=trainer[1], round_=round_), coordinator.now())
            assert run.pulled == pulled


async def test_nothing_is_acknowledged_that_the_disk_does_not_have(monkeypatch):
    """Else another life of the coordinator would not know of it."""
    async with coordinating(FakePservers(), lease_seconds=30, num_trainers=1) as coordinator:
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        transport = httpx.ASGITransport(app)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            file, is_full = coordinator._file, True
            write = file.write

            def write_if_there_is_room(record: ClusterRecord) -> None:
                if is_full:
                    raise OSError(errno.ENOSPC, "no space left on device")
                write(record)

            monkeypatch.setattr(file, "write", write_if_there_is_room)

            async def post(path: str, message: Message) -> dict[str, Any]:
                nonlocal is_full
                is_full = True
                answer = await http.post(path, content=message.model_dump_json())
                assert (answer.status_code, answer.json()["code"]) == (503, "try_again")
                is_full = False
                answer = await http.post(path, content=message.model_dump_json())
                answer.raise_for_status()
                return answer.json() if answer.content else {}

            def trainer_on_disk() -> TrainerRecord:
                record = RecordFile(coordinator._settings.state_dir).read()
                assert record is not None
                assert record.run is not None
                return record.run.trainers[0]

            for index in (0, 1):
                await post(REGISTER_PSERVER, registration(str(index), index=index))
            run = (await post(JOIN_TRAINER, joining("a", 0)))["run"]
            assert not trainer_on_disk().declared
            await post(DECLARE_MODEL.format(rank=0), model(run=run))
            assert trainer_on_disk().declared
            await coordinator.wait_until(lambda: coordinator.cluster.run.state == "training", 5)
            await post(LEAVE.format(rank=0), leaving(run=run))
            assert trainer_on_disk().state == "done"
