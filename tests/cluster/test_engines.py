"""The conformance suite of `StepEngine`: every check runs on every kind of engine that has the feature."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradpost import Session
from ps_protocol.errors import ModelMismatch, NonFiniteGradient
from trainer_client.engines.engine import StepEngine, StepProgress
from trainer_client.engines.host import HostEngine
from trainer_client.engines.pserver import PserverEngine
from trainer_client.engines.ring import RingEngine
from trainer_client.session import host as hosts
from trainer_client.session import session as session_module
from trainer_client.session.host import HostPlace
from trainer_client.testing import LocalCluster
from trainer_client.transport.work import Work, pause

from .conftest import StartCluster
from .training import run_all, wrap_model

pytestmark = pytest.mark.cluster


class Kind(NamedTuple):
    """A kind of engine and the processes that train with it: two trainers, or two processes of one, or one process."""

    engine: type[StepEngine]  # of each process
    cluster: Mapping[str, Any] | None  # its settings; None: there is no cluster
    arguments: Mapping[str, Any] = {}  # of each RemoteOptimizer
    marks: Collection[pytest.MarkDecorator] = ()

    @property
    def is_host(self) -> bool:
        return self.engine is HostEngine

    @property
    def is_delayed(self) -> bool:
        """True if `step` returns before its values are in the parameters."""
        return "overlap_pulls" in self.arguments or "max_delay" in (self.cluster or {})


KINDS = {
    "pserver": Kind(PserverEngine, {}),
    "pserver, overlapped": Kind(PserverEngine, {}, {"overlap": True, "overlap_pulls": True}, [pytest.mark.overlap]),
    "pserver, delayed": Kind(PserverEngine, {"max_delay": 1}, marks=[pytest.mark.extended]),
    "ring": Kind(RingEngine, {"strategy": "ring"}, marks=[pytest.mark.ring]),
    "host": Kind(HostEngine, {"trainers": 1}, marks=[pytest.mark.hosts]),
    "local": Kind(RingEngine, None),
}


class Process:
    """A process that trains two parameters, which begin with zeros, by SGD with a learning rate of 1.

    Its gradients are a value times its rank + 1.
    """

    def __init__(self, kind: Kind, cluster: LocalCluster | None, session: Session, **arguments: Any) -> None:
        self.kind = kind
        self.cluster = cluster
        self.session = session
        self.model = nn.ParameterDict({"weight": torch.zeros(200, 200), "bias": torch.zeros(5)})
        self.optimizer = wrap_model(session, self.model, lr=1.0, **{**kind.arguments, **arguments})
        self.engine = self.optimizer._engine
        assert type(self.engine) is kind.engine
        self.takes_part = session.host is None or session.host.is_leader  # else process 0 of its host does
        self.is_last = session.rank == session.world_size - 1
        self.mean = (session.world_size + 1) / 2  # of the gradients of value 1

    def gradients(self, value: float = 1.0) -> dict[str, Tensor]:
        own = value * (self.session.rank + 1)
        return {name: torch.full((parameter.numel(),), own) for name, parameter in self.model.items()}

    def begin(self, gradients: Mapping[str, Tensor], *, is_finite: bool = True) -> None:
        work = self.optimizer._work
        contribution = work.contribute(work.model.parameters, is_finite)
        assert contribution is not None
        self.engine.step(contribution._replace(gradients=gradients))

    def take(self, gradients: Mapping[str, Tensor], *, is_finite: bool = True) -> None:
        self.begin(gradients, is_finite=is_finite)
        self.engine.synchronize()

    def step(self, value: float = 1.0) -> None:
        self.take(self.gradients(value))

    def assert_values(self, value: float) -> None:
        assert [parameter.unique().tolist() for parameter in self.model.values()] == [[value], [value]]


# ---------------------------------------------------------------------- the checks


def a_step_begins_and_its_values_arrive_when_they_are_waited_for(process: Process) -> None:
    engine = process.engine
    assert engine.progress == StepProgress()
    process.begin(process.gradients())
    assert engine.progress == StepProgress(begun=1, version=0 if process.kind.is_delayed else 1)
    assert engine.synchronize() or not process.kind.is_delayed
    assert engine.progress == StepProgress(begun=1, version=1)
    process.assert_values(-process.mean)

    gradients = process.gradients()
    gradients.pop("weight")
    process.take(gradients)
    assert process.model["weight"].unique() == -process.mean  # no process has a gradient
    assert process.model["bias"].unique() == -2 * process.mean
    assert engine.progress == StepProgress(begun=2, version=2)


def gradients_are_read_until_step_returns(process: Process) -> None:
    client: Any = process.session.client
    push = client.pservers.push

    def push_late(*arguments: Any) -> Work[None]:
        yield from pause(0.05)
        yield from push(*arguments)

    client.pservers.push = push_late
    gradients = process.gradients()
    process.begin(gradients)
    for name, gradient in process.gradients().items():
        assert torch.equal(gradients[name], gradient)  # the engine does not change them
        gradients[name].fill_(99.0)
    process.engine.synchronize()
    process.assert_values(-process.mean)


def parameters_change_within_step_and_synchronize_only(process: Process) -> None:
    process.step()
    gradients = process.gradients(2.0)
    if isinstance(process.engine, PserverEngine):
        process.engine.add_gradient("bias", gradients["bias"])
    process.assert_values(-process.mean)
    process.begin(gradients)
    process.session.io.run(process.session.client.finish())  # all pulls have ended
    if "overlap_pulls" not in process.kind.arguments:
        process.assert_values(-process.mean * (1 if process.kind.is_delayed else 3))
    process.engine.synchronize()
    process.assert_values(-3 * process.mean)


def added_gradients_can_be_discarded(process: Process) -> None:
    assert isinstance(process.engine, PserverEngine)
    process.engine.add_gradient("bias", torch.full((5,), 7.0))
    process.engine.discard_gradients()
    assert process.engine.progress == StepProgress()
    gradients = process.gradients()
    if process.session.rank == 0:
        gradients.pop("bias")
    else:
        process.engine.add_gradient("bias", gradients["bias"])
    process.take(gradients)
    assert process.model["weight"].unique() == -process.mean
    assert process.model["bias"].unique() == 1 / process.session.world_size - process.mean  # without that of rank 0


def a_refused_step_can_be_taken_again(process: Process) -> None:
    process.step()
    gradients = process.gradients(2.0)
    if process.is_last:
        gradients["weight"][3] = math.nan
    if process.is_last or process.kind.is_host:
        with pytest.raises(NonFiniteGradient, match=r"NaN or infinity in .*'weight"):
            process.take(gradients)
        assert process.engine.progress == StepProgress(begun=1, version=1)
        process.assert_values(-process.mean)
    process.step(4.0)  # nothing of the refused step was sent
    assert process.engine.progress == StepProgress(begun=2, version=2)
    process.assert_values(-5 * process.mean)


def a_round_with_overflow_or_nan_is_skipped(process: Process) -> None:
    process.step()
    process.take({} if process.is_last else process.gradients(2.0), is_finite=not process.is_last)
    process.assert_values(-process.mean)
    assert process.engine.progress == StepProgress(begun=2, version=2)
    assert list(process.session.client.results.skipped) == [2]
    gradients = process.gradients(2.0)
    if process.is_last:
        gradients["weight"][3] = math.nan
    process.take(gradients)
    process.assert_values(-process.mean)
    process.step(3.0)
    process.assert_values(-4 * process.mean)


def training_continues_from_the_values_of_the_lowest_rank(process: Process) -> None:
    for value in (5.0, 9.0):  # before the first round and later
        with torch.no_grad():
            for parameter in process.model.values():
                parameter.fill_(value + process.session.rank)
        process.engine.replace_values({"weight", "bias"})
        process.step()
        process.assert_values(value - process.mean)


def parameters_can_move_to_other_memory(process: Process) -> None:
    process.step()
    before = [parameter.data for parameter in process.model.values()]
    for parameter in process.model.values():
        parameter.data = parameter.data.clone()
    process.engine.follow_parameters()
    process.step(2.0)
    process.assert_values(-3 * process.mean)
    assert all((tensor == -process.mean).all() for tensor in before)


def the_state_of_the_optimizer_is_saved_and_loaded(process: Process) -> None:
    for group in process.optimizer.param_groups:
        group["momentum"] = 0.5
    value = 2.0 if process.session.rank == 0 or type(process.engine) is RingEngine else 9.0  # the lowest rank's counts
    loaded = process.optimizer.state_dict()
    for index, parameter in enumerate(process.model.values()):
        loaded["state"][index] = {"momentum_buffer": torch.full_like(parameter, value)}
    process.optimizer.load_state_dict(loaded)
    process.step()
    process.assert_values(-1 - process.mean)
    saved = process.optimizer.state_dict()
    assert bool(saved["state"]) == process.takes_part
    for state in saved["state"].values():
        assert state["momentum_buffer"].unique() == 1 + process.mean


def some_parameters_can_be_waited_for(process: Process) -> None:
    engine = process.engine
    assert isinstance(engine, PserverEngine)
    process.begin(process.gradients())
    assert engine.pending == {"weight", "bias"}
    assert not engine.wait_for_parameters({"bias"})
    assert process.model["bias"].unique() == -process.mean
    assert (engine.pending, engine.progress.version) == ({"weight"}, 0)
    assert not engine.wait_for_parameters({"weight"})
    assert (engine.pending, engine.progress.version) == (set(), 1)
    process.assert_values(-process.mean)


def a_rollback_is_followed(process: Process) -> None:
    process.step()
    process.step(2.0)
    assert process.cluster is not None
    if process.session.rank == 0:
        assert process.cluster.view.create_checkpoint().round == 2
    process.step(3.0)
    if process.session.rank == 0:
        process.cluster.view.roll_back(2)
    process.step(4.0)  # which is lost, too
    assert process.engine.progress == StepProgress(begun=2, version=2, num_rollbacks=1)
    process.assert_values(-3 * process.mean)
    process.step(5.0)
    assert process.engine.progress == StepProgress(begun=3, version=3, num_rollbacks=1)
    process.assert_values(-8 * process.mean)


def a_trainer_may_have_fewer_steps(process: Process) -> None:
    process.step()
    process.step(2.0)
    process.assert_values(-3 * process.mean)
    if not process.is_last:
        process.step(3.0)
        process.step(4.0)
        assert process.engine.progress == StepProgress(begun=4, version=4)
        process.assert_values(-3 * process.mean - 7)


def close_finishes_the_steps_that_have_begun(process: Process) -> None:
    process.begin(process.gradients())
    process.session.close()
    if process.takes_part:
        assert process.session.round == 1
    with pytest.raises(RuntimeError, match=r"the session is closed.*call step\(\) before close\(\)"):
        process.optimizer.step()


Check = Callable[[Process], None]
PSERVER = {name for name, kind in KINDS.items() if kind.engine is PserverEngine}
HOSTS = {name for name, kind in KINDS.items() if kind.is_host}
# Each check, and the kinds of engines that have the feature.
CHECKS: dict[Check, Collection[str]] = {
    a_step_begins_and_its_values_arrive_when_they_are_waited_for: KINDS,
    gradients_are_read_until_step_returns: KINDS,
    parameters_change_within_step_and_synchronize_only: KINDS,
    added_gradients_can_be_discarded: PSERVER,
    a_refused_step_can_be_taken_again: KINDS,
    a_round_with_overflow_or_nan_is_skipped: KINDS,
    training_continues_from_the_values_of_the_lowest_rank: KINDS,
    parameters_can_move_to_other_memory: KINDS,
    the_state_of_the_optimizer_is_saved_and_loaded: KINDS,
    some_parameters_can_be_waited_for: {"pserver, overlapped"},
    a_rollback_is_followed: PSERVER | HOSTS,  # without pservers there are no checkpoints of the run
    a_trainer_may_have_fewer_steps: {*PSERVER, "ring"},  # the processes of a host have the same number
    close_finishes_the_steps_that_have_begun: KINDS,
}
ARGUMENTS: dict[Check, dict[str, Any]] = {a_round_with_overflow_or_nan_is_skipped: {"nonfinite": "skip_round"}}


def cases() -> list[Any]:
    return [
        pytest.param(kind, check, marks=kind.marks, id=f"{name}-{check.__name__}")
        for name, kind in KINDS.items()
        for check, names in CHECKS.items()
        if name in names
    ]


@pytest.mark.parametrize(("kind", "check"), cases())
def test_the_engine_follows_the_contract(
    shared_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch, kind: Kind, check: Check
) -> None:
    cluster = None if kind.cluster is None else shared_cluster(on_trainer_loss="fail", lease_seconds=10, **kind.cluster)

    def work(session: Session) -> None:
        check(Process(kind, cluster, session, **ARGUMENTS.get(check, {})))

    if cluster is None:
        with Session(strategy="local") as session:
            work(session)
    elif kind.is_host:
        run_host(cluster, work, monkeypatch)
    else:
        run_all(cluster, work)


def run_host(cluster: LocalCluster, work: Callable[[Session], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the same work in two processes of a host, which are threads: they meet in a store of this process."""
    store = dist.HashStore()  # type: ignore[attr-defined] # not in its stubs
    monkeypatch.setattr(hosts, "_reach_store", lambda: store)
    monkeypatch.setattr(hosts, "_numbers", itertools.repeat(0))

    places = [HostPlace(process, 2, process, 2, trainer=0, num_trainers=1) for process in range(2)]
    monkeypatch.setattr(session_module, "find_place", lambda _: places.pop())

    def run(_: int) -> None:
        with Session(coordinator=cluster.address) as session:
            work(session)

    with ThreadPoolExecutor(len(places)) as threads:
        list(threads.map(run, range(len(places))))


@pytest.mark.hosts
def test_different_models_on_a_host_are_refused(shared_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(session: Session) -> None:
        with pytest.raises(ModelMismatch, match="process 1 of this host differs from process 0 in its parameters"):
            wrap_model(session, nn.Linear(4, 2 + session.rank))

    run_host(shared_cluster(on_trainer_loss="fail", lease_seconds=10, trainers=1), work, monkeypatch)
