"""The in-sync sets and the fail-overs of a real coordinator, with simulated pservers and standbys."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from ps_config.control_client import send_message
from ps_protocol import routes
from ps_protocol.errors import NotReady, StalePserver, TryAgain
from ps_protocol.fields import Message
from ps_protocol.membership import FrozenRounds, HeldRun, InstallRun, PserverRegistered, RegisterPserver
from ps_protocol.messages import PserverHeartbeatReply, PserverState, TrainerHeartbeatReply
from ps_protocol.standbys import FenceStandby, PserverEnded, ReportStandby, SeenStandbys
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.coordinator import failover
from services.coordinator.coordinator import Coordinator
from services.coordinator.process import make_coordinator_app, measure_cluster
from services.coordinator.shell import RecordFile
from services.coordinator.state.replicas import Replicas
from services.runtime.metrics import ServiceMetrics

from .coordinating import FakePservers, answering, eventually, training
from .support import alive, beat

APPLIED = 4  # by each pserver and standby


class FakeProcesses(FakePservers):
    """Two pservers, and standbys of pserver 0, which become pservers. Each is known by the host of its address."""

    def __init__(self, *standbys: str) -> None:
        super().__init__()
        self.taken = defaultdict(list, self.taken)
        self.down: set[str] = set()  # refuse connections
        self.silent: set[str] = set()  # do not answer
        self.fenced: list[str] = []
        self.promoted: dict[str, PserverRegistered] = {}
        self.lose_promotions = 0  # whose answers are lost, after they have had their effect
        self.empty_standbys: set[str] = set()
        self.instances = {name: f"standby {name}" for name in standbys}

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        if host in self.down:
            raise httpx.ConnectError("refused")
        if host in self.silent:
            await asyncio.sleep(request.extensions["timeout"]["read"])
            raise httpx.ReadTimeout("no answer")
        if path == routes.STATE:
            incarnation = self.promoted[host].incarnation if host in self.promoted else 1
            state = PserverState(index=0, incarnation=incarnation, run="run", round=APPLIED)
            return httpx.Response(200, content=state.model_dump_json())
        if path == routes.FENCE_STANDBY:
            self.fenced.append(host)
            if host in self.empty_standbys:
                raise NotReady("the standby has no replica")
            return httpx.Response(200, content=self._register(host, request).model_dump_json())
        if path == routes.PROMOTE_STANDBY:
            self.promoted[host] = PserverRegistered.model_validate_json(request.content)
            if self.lose_promotions:
                self.lose_promotions -= 1
                raise httpx.ReadTimeout("the answer was lost")
            return httpx.Response(204)
        if host in self.instances and host not in self.promoted:
            raise StalePserver("a standby serves no run")
        return await super().__call__(request)

    def _register(self, host: str, request: httpx.Request) -> RegisterPserver:
        message = FenceStandby.model_validate_json(request.content)
        return RegisterPserver(
            protocol=PROTOCOL_VERSION, instance=self.instances[host], address=f"http://{host}:1", http2=True, index=0,
            previous=message.incarnation, held=hold(message.run, message.attempt),
        )  # fmt: skip


def hold(run: str, attempt: int, applied: int = APPLIED, *, has_rebooted: bool = False, **rounds: Any) -> HeldRun:
    return HeldRun(
        run=run,
        attempt=attempt,
        plan="plan",
        rounds=FrozenRounds(applied=applied, **rounds),
        has_rebooted=has_rebooted,
    )


class Cluster:
    """A coordinator, whose API its members call."""

    def __init__(self, coordinator: Coordinator, http: httpx.AsyncClient, processes: FakeProcesses) -> None:
        self.coordinator = coordinator
        self.processes = processes
        self._http = http

    async def send(self, path: str, message: Message) -> bytes:
        return await send_message(self._http, "POST", f"http://localhost{path}", message, timeout=5)

    @property
    def replicas(self) -> Replicas:
        return self.coordinator.cluster.registry.replicas[0]

    @property
    def run(self) -> str:
        return self.coordinator.cluster.run.record.name

    async def report(self, name: str = "s", **changes: Any) -> None:
        fields = {"follows": 0, "run": self.run, "attempt": 0, "round": APPLIED, **changes}
        message = ReportStandby(
            protocol=PROTOCOL_VERSION, instance=f"standby {name}", address=f"http://{name}:1", **fields
        )
        await self.send(routes.REPORT_STANDBY, message)

    async def beat(
        self, connected: str = "", caught_up: str = "", number: int | None = None, incarnation: int = 1, **fields: Any
    ) -> PserverHeartbeatReply:
        """Send the heartbeat of pserver 0, which has received the set with this number (default: the newest)."""
        seen = SeenStandbys(
            number=self.replicas.number if number is None else number,
            connected=tuple(f"standby {name}" for name in connected),
            caught_up=tuple(f"standby {name}" for name in caught_up),
        )
        message = beat(incarnation, self.run, APPLIED, standbys=seen, **fields)
        return PserverHeartbeatReply.from_answer(await self.send(routes.PSERVER_HEARTBEAT.format(index=0), message))

    async def join(self, *names: str) -> None:
        """Let standbys become members of the in-sync set of pserver 0."""
        for name in names:
            await self.report(name)
        together = "".join(names)
        await self.beat(together)
        await self.beat(together, together)
        assert self.replicas.in_sync == {f"standby {name}" for name in names}

    def count_in_sync(self) -> float | None:
        """Return the standbys of pserver 0 that are in sync and connected, as Prometheus reads them."""
        registry = CollectorRegistry()
        measure_cluster(self.coordinator.cluster, registry)
        return registry.get_sample_value("gradpost_standbys_in_sync", {"pserver": "0"})

    def is_replaced(self, by: str = "s", incarnation: int = 2) -> bool:
        """Return whether another process holds the run as pserver 0."""
        cluster = self.coordinator.cluster
        infos = {info.index: (info.address, info.incarnation) for info in cluster.pserver_infos}
        return infos.get(0) == (f"http://{by}:1", incarnation) and not cluster.run.is_changing


@asynccontextmanager
async def running(*standbys: str, **settings: Any) -> AsyncIterator[Cluster]:
    processes = FakeProcesses(*standbys)
    async with (
        training(processes, **{"durability": "replicated", **settings}) as coordinator,
        connecting(coordinator, processes) as cluster,
    ):
        await cluster.beat()
        yield cluster


@asynccontextmanager
async def connecting(coordinator: Coordinator, processes: FakeProcesses) -> AsyncIterator[Cluster]:
    app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:
        yield Cluster(coordinator, http, processes)


def read_replicas(coordinator: Coordinator) -> Replicas:
    record = RecordFile(coordinator.settings.state_dir).read()
    assert record is not None
    return record.replicas[0]


# ---------------------------------------------------------------- the in-sync set


async def test_a_standby_joins_and_leaves_and_the_disk_has_it_before_the_leader() -> None:
    async with running("s") as cluster:
        assert (await cluster.beat("s")).required.instances == ()  # the coordinator does not know it
        await cluster.report("s")
        joined = await cluster.beat("s")
        assert joined.required.instances == ("standby s",)
        assert read_replicas(cluster.coordinator).joining == {"standby s"}
        assert (await cluster.beat("s", "s", number=0)).required == joined.required  # about an earlier set
        assert not cluster.replicas.in_sync
        await cluster.beat("s", "s")
        assert read_replicas(cluster.coordinator).in_sync == {"standby s"}
        left = await cluster.beat("")
        assert not left.notice  # nothing waits with `continue`
        assert left.required.instances == ()
        assert left.required.number > joined.required.number
        assert read_replicas(cluster.coordinator).waits_for == frozenset()


async def test_with_wait_a_member_stays_until_another_replaces_it() -> None:
    async with running("s", "t", replica_loss="wait") as cluster:
        await cluster.join("s")
        assert cluster.count_in_sync() == 1
        assert (await cluster.beat("")).required.instances == ("standby s",)
        assert cluster.count_in_sync() == 0
        reply = await cluster.beat("")
        assert reply.notice.startswith("pserver 0 waits for a standby in sync (replica_loss wait)")
        assert cluster.coordinator.cluster.waiting_for == ["a standby of pserver 0"]
        await cluster.report("t")
        assert (await cluster.beat("t")).required.instances == ("standby s", "standby t")
        assert (await cluster.beat("t", "t")).required.instances == ("standby t",)


async def test_a_set_that_is_not_written_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("s") as cluster:
        await cluster.report("s")
        coordinator = cluster.coordinator
        with monkeypatch.context() as patch:
            patch.setattr(coordinator.file, "write", lambda _: (_ for _ in ()).throw(OSError("full")))
            with pytest.raises(TryAgain):
                await cluster.beat("s")
            with pytest.raises(TryAgain):  # though nothing changes now
                await cluster.beat("s")
        assert (await cluster.beat("s")).required.instances == ("standby s",)
        assert read_replicas(coordinator).joining == {"standby s"}


# ---------------------------------------------------------------- fail-over


async def test_a_standby_in_sync_replaces_a_dead_pserver() -> None:
    async with running("s", "t") as cluster:
        await cluster.join("s", "t")
        cluster.processes.down |= {"0", "t"}
        await cluster.report("t", lost=1, round=APPLIED + 1)  # it would be the first choice
        await eventually(cluster.is_replaced)
        assert cluster.processes.fenced == ["s"]
        assert cluster.processes.promoted["s"].incarnation == 2
        [installed] = [message for message in cluster.processes.taken["s"] if isinstance(message, InstallRun)]
        assert installed.incarnation == 2
        assert installed.required.instances == ("standby t",)
        record = read_replicas(cluster.coordinator)
        assert (record.leader, record.incarnation, record.in_sync) == ("standby s", 2, {"standby t"})
        texts = [event.text for event in cluster.coordinator.events.after(0)]
        assert "pserver 0 is replaced by its standby at http://s:1" in texts
        assert [one.report.address for one in cluster.coordinator.cluster.registry.standbys.values()] == ["http://t:1"]


async def test_a_pserver_that_answers_the_second_probe_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "PROBE_SECONDS", 0.1)
    async with running("s") as cluster:
        await cluster.join("s")
        cluster.processes.silent.add("0")
        await cluster.report("s", lost=1)
        await asyncio.sleep(0.05)
        cluster.processes.silent.discard("0")
        await eventually(lambda: not cluster.coordinator.failover._tasks)
        assert (cluster.processes.fenced, cluster.replicas.is_suspected) == ([], False)


async def test_the_report_of_a_supervisor_needs_no_probe() -> None:
    async with running("s") as cluster:
        await cluster.join("s")
        path = routes.PSERVER_ENDED.format(index=0)
        await cluster.send(path, PserverEnded(address="http://another:1"))
        await asyncio.sleep(0)
        assert not cluster.coordinator.failover._tasks
        await cluster.send(path, PserverEnded(address="http://0:1"))
        await eventually(cluster.is_replaced)


async def test_a_pserver_whose_disk_hangs_is_replaced_although_it_answers() -> None:
    async with running("s") as cluster:
        await cluster.join("s")
        await cluster.beat("s", is_stalled=True)
        await eventually(cluster.is_replaced)


async def test_a_change_that_waits_for_the_dead_pserver_is_superseded() -> None:
    async with running("s") as cluster:
        await cluster.join("s")
        cluster.processes.silent.add("0")
        cluster.coordinator.cluster.run = cluster.coordinator.cluster.run.with_change()
        cluster.coordinator.changed()
        await eventually(lambda: bool(cluster.coordinator._calls[0]))
        await cluster.report("s", lost=1)
        member = cluster.coordinator.cluster.registry.members[0]
        async with asyncio.timeout(3):  # the request would wait for 5 s
            await eventually(cluster.is_replaced)
            with pytest.raises(httpx.ReadTimeout, match="another process has replaced pserver 0"):
                await cluster.coordinator.call(member, "GET", routes.RESTORABLE)


async def test_a_pserver_whose_lease_has_ended_is_replaced_although_it_answers() -> None:
    async with running("s") as cluster:
        await cluster.join("s")
        registry = cluster.coordinator.cluster.registry
        seen_at = cluster.coordinator.now() - registry.lease_seconds
        members = {0: replace(registry.members[0], seen_at=seen_at), 1: registry.members[1]}
        cluster.coordinator.cluster.registry = replace(registry, known=members)
        await eventually(cluster.is_replaced)


async def test_the_answer_to_a_trainer_waits_for_the_successor() -> None:
    async with running("s") as cluster:
        await cluster.join("s")
        cluster.processes.down.add("0")
        message = alive(run=cluster.run).model_copy(update={"unreachable": {0: (1, 0.1)}})
        body = await cluster.send(routes.TRAINER_HEARTBEAT.format(rank=0), message)
        assert [(p.index, p.incarnation) for p in TrainerHeartbeatReply.from_answer(body).pservers] == [(0, 2), (1, 1)]


# ---------------------------------------------------------------- crashes of the coordinator


@asynccontextmanager
async def restarted(cluster: Cluster) -> AsyncIterator[Cluster]:
    """Another process of the coordinator, with the state that the first one has written by now."""
    settings = cluster.coordinator.settings
    record = RecordFile(settings.state_dir).read()
    assert record is not None
    folder = settings.state_dir / "another"
    folder.mkdir()
    RecordFile(folder).write(record)
    stop, handle = asyncio.Event(), answering(cluster.processes)
    async with (
        httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        coordinator = Coordinator(settings.model_copy(update={"state_dir": folder}), http)
        await coordinator.restore()
        tasks.create_task(coordinator.run(stop))
        async with connecting(coordinator, cluster.processes) as another:
            yield another
        stop.set()
        coordinator.changed()


@pytest.mark.parametrize("point", ["fence.before", "promote.before", "promote.after"])
async def test_a_restarted_coordinator_completes_the_fail_over(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = asyncio.Event()

    def end_task(name: str) -> None:
        if name == point:
            reached.set()
            raise asyncio.CancelledError

    async with running("s") as cluster:
        await cluster.join("s")
        cluster.processes.down.add("0")
        with monkeypatch.context() as patch:
            patch.setattr(failover, "reach_failpoint", end_task)
            patch.setattr(failover.FailOver, "suspect_lost", lambda _: None)
            await cluster.report("s", lost=1)
            await asyncio.wait_for(reached.wait(), 5)
        cluster.coordinator.failover.close()
        assert cluster.processes.promoted == {}
        async with restarted(cluster) as another:
            await another.report("s", lost=1)
            await eventually(another.is_replaced)
            assert list(another.processes.promoted) == ["s"]


async def test_with_a_log_alone_a_dead_pserver_is_not_replaced() -> None:
    async with running("s", durability="log") as cluster:
        await cluster.report("s")
        cluster.processes.down.add("0")
        await cluster.send(routes.PSERVER_ENDED.format(index=0), PserverEnded(address="http://0:1"))
        assert not cluster.coordinator.failover._tasks
