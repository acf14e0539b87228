"""Steps, interrupts and ends of scripts: as with torch.optim, and the other trainers learn the reason."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradpost import RemoteOptimizer, Session
from ps_protocol.errors import ContributionConflict, ModelMismatch, TrainerLost
from trainer_client.engines import pipeline
from trainer_client.engines.pipeline import Pipeline
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from .conftest import StartCluster
from .training import run_all, step_with, wrap_model, wrap_weight
from .up_support import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def alone(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(trainers=1, min_block_size=4, on_trainer_loss="fail")


def test_a_run_that_the_script_does_not_expect_is_refused(alone: LocalCluster) -> None:
    with raises_code("mode_mismatch") as refused:
        Session(coordinator=alone.address, rank=0, expect={"mode": "async", "max_delay": 0})
    assert refused.value.facts == {"expected": {"mode": "sync"}, "actual": {"mode": "async"}}
    Session(coordinator=alone.address, rank=0, expect={"mode": "sync", "strategy": "ps"}).close()


def sgd(session: Session, **parameters: nn.Parameter) -> RemoteOptimizer:
    return RemoteOptimizer(torch.optim.SGD([*parameters.items()], lr=1.0), session=session)


def test_a_graph_from_before_the_step_cannot_be_used_after_it(session: Session) -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = sgd(session, weight=weight)
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_closure_is_called_once_and_its_loss_returned(session: Session) -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = sgd(session, weight=weight)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    assert optimizer.step(closure) == 16.0
    assert calls == [16.0]
    assert weight[0].item() == -1.0


def test_another_model_ends_a_run_whose_trainers_are_gone(own_cluster: StartCluster) -> None:
    cluster = own_cluster(pservers=1, trainers=1, on_trainer_loss="wait")

    def work(session: Session, size: int, *, fails: bool = False) -> int:
        weight, optimizer = wrap_weight(session, size)
        step_with(optimizer, weight)
        if fails:
            raise ValueError("a bug")
        return optimizer.round

    with pytest.raises(ValueError, match="a bug"):
        run_all(cluster, partial(work, size=4, fails=True))
    with pytest.raises(ModelMismatch, match=r"All trainers of run \w+ are gone, so that it has ended"):
        run_all(cluster, partial(work, size=6))
    assert run_all(cluster, partial(work, size=6)) == [1]


def test_an_interrupted_step_is_finished_with_its_own_gradient(own_cluster: StartCluster) -> None:
    """The stop button of a notebook: the script continues with another batch, after the others have."""
    cluster, has_interrupted = own_cluster(pservers=1, on_trainer_loss="fail"), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def train_as_other() -> float:
        with Session(coordinator=cluster.address, rank=1, world_size=2) as session:
            weight, optimizer = wrap_weight(session, 8)
            assert wait_until(lambda: cluster.view.pserver_state(0).batch_barriers == (0,), 60)
            signal.pthread_kill(main, signal.SIGINT)
            assert has_interrupted.wait(60)
            for _ in range(2):
                step_with(optimizer, weight)
            return weight[0].item()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(train_as_other)
        with Session(coordinator=cluster.address, rank=0, world_size=2) as session:
            weight, optimizer = wrap_weight(session, 8, overlap=True)
            with pytest.raises(KeyboardInterrupt):
                step_with(optimizer, weight, value=10.0)
            has_interrupted.set()
            assert wait_until(lambda: cluster.view.pserver_state(0).round == 1, 60)
            said = r"interrupted .* in round 1.* Call synchronize\(\) to finish"
            optimizer.zero_grad()
            with pytest.raises(ContributionConflict, match=said):  # noqa: PT012 - the gradient would leave at once
                (100 * weight).sum().backward()
                optimizer.step()
            optimizer.synchronize()
            assert weight[0].item() == -5.5
            optimizer.zero_grad()
            step_with(optimizer, weight, value=100.0)
            assert weight[0].item() == -56.0 == other.result(60)


def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose first call is interrupted."""
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_rollback_is_finished(
    alone: LocalCluster, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    with Session(coordinator=alone.address, rank=0, world_size=1) as session:
        weight, optimizer = wrap_weight(session, 8, overlap=overlap)

        def step() -> None:
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()

        step()
        made = alone.view.create_checkpoint().round
        for _ in range(2):
            step()
        alone.view.roll_back(made)
        monkeypatch.setattr(Pipeline, "pull_start", interrupting(Pipeline.pull_start))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the news come with a heartbeat
            for _ in range(1000):
                step()
        step()  # its gradient is of values that are gone
        assert (optimizer.round, weight.tolist()) == (made, [-1.0 * made] * 8)
        for _ in range(2):
            step()
        assert (optimizer.round, weight.tolist()) == (made + 2, [-1.0 * (made + 2)] * 8)


def test_parameters_that_an_interrupt_left_unwritten_are_written(
    alone: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)) for _ in range(2)]
    with Session(coordinator=alone.address, rank=0, world_size=1) as session:
        optimizer = sgd(session, a=weights[0], b=weights[1])
        step_with(optimizer, *weights)
        monkeypatch.setattr(pipeline, "write_back", interrupting(pipeline.write_back))
        with pytest.raises(KeyboardInterrupt):
            step_with(optimizer, *weights)
        weights[1].grad = None
        with pytest.raises(ContributionConflict, match=r"Call synchronize\(\)"):
            step_with(optimizer, weights[0])
        optimizer.synchronize()
        assert [set(weight.flatten().tolist()) for weight in weights] == [{-2.0}, {-2.0}]
        step_with(optimizer, weights[0])
        assert [set(weight.flatten().tolist()) for weight in weights] == [{-3.0}, {-2.0}]


def test_a_backward_pass_that_was_interrupted_may_be_repeated(alone: LocalCluster) -> None:
    model, interrupted = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), iter([False, True])

    def interrupt(_: torch.Tensor) -> None:
        if next(interrupted, False):
            raise KeyboardInterrupt

    with Session(coordinator=alone.address, rank=0, world_size=1) as session:
        optimizer = wrap_model(session, model, overlap=True)
        model[0].weight.register_hook(interrupt)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        step()
        with pytest.raises(KeyboardInterrupt):
            step()
        step()
        assert optimizer.round == 2


SCRIPT = """
import sys
import torch
from gradpost import RemoteOptimizer, connect

session = connect()
RemoteOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))], lr=1.0)).step()
{end}
"""
RICH = "import rich.traceback; rich.traceback.install()"  # it does not call the hook that was there


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        (f"{RICH}; raise ValueError('no')", 1, "ValueError: no"),
        ("try: sys.exit(2)\nexcept SystemExit: pass", 0, None),
        ("sys.exit(3)", 3, None),  # `gradpost up` sees it
        ("with session: sys.exit(4)", 4, "SystemExit: 4"),
    ],
)
def test_a_script_leaves_as_it_ends(
    alone: LocalCluster, end: str, code: int, reason: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    check_end(alone, [sys.executable, str(script)], code, reason)


def check_end(cluster: LocalCluster, command: list[str], code: int, reason: str | None) -> None:
    child = cluster.start_trainer(0, command)
    try:
        ended = child.wait(60)
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(["it has not ended", *cluster.output]))
    assert ended == code, "\n".join(cluster.output)
    status = cluster.status()  # at once, before any lease has ended
    assert status.state == ("finished" if reason is None else "failed")
    failure = None if status.failure is None else status.failure["detail"]
    assert failure == (None if reason is None else f"trainer 0 failed: {reason}")


CHILD = """
import faulthandler, multiprocessing, sys

def work():
    faulthandler.dump_traceback_later(40)  # shows where it hangs
    import torch
    from gradpost import RemoteOptimizer
    RemoteOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))], lr=1.0)).step()
    raise ValueError("no")

if __name__ == "__main__":
    from gradpost import connect
    connect().close()  # the child is a script of its own
    child = multiprocessing.get_context("fork").Process(target=work)
    try:
        raise KeyError("a fork inherits what is being handled")
    except KeyError:
        child.start()
    faulthandler.dump_traceback_later(40)  # not before: a fork would wait for its thread
    child.join()
    sys.exit(child.exitcode)
"""
OF_A_PARENT = """
import multiprocessing, sys
import torch
from gradpost import RemoteOptimizer, connect

session = connect()
weights = [torch.nn.Parameter(torch.zeros(8))]
optimizer = RemoteOptimizer(torch.optim.SGD(weights, lr=1.0))

def work():
    assert repr(session).endswith("closed]>"), session
    for use in (lambda: RemoteOptimizer(torch.optim.SGD(weights, lr=1.0)), optimizer.step, session.summary):
        try:
            use()
        except RuntimeError as error:
            assert "call connect() in the child process that trains" in str(error), error
        else:
            exit(6)

child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
sys.exit(child.exitcode)
"""


@pytest.mark.extended
def test_a_forked_child_cannot_train_in_the_session_of_its_parent(alone: LocalCluster) -> None:
    check_end(alone, [sys.executable, "-c", OF_A_PARENT], 0, None)


RAISED = "ValueError: no" if sys.version_info < (3, 13) else "SystemExit: 1"


def test_a_forked_child_leaves_when_it_ends(alone: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    check_end(alone, [sys.executable, str(script)], 1, RAISED)


# ---------------------------------------------------------------------- what a script may rely on


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(min_block_size=4, on_trainer_loss="fail")


def test_leaving_in_the_middle_of_a_round_is_failing(cluster: LocalCluster) -> None:
    def work(session: Session) -> None:
        weight, optimizer = wrap_weight(session, 4)
        if session.rank == 0:
            session.client.coordinator.counted_round = 1  # a pserver may have its whole contribution
            return
        with pytest.raises(TrainerLost, match="trainer 0 failed: it left in the middle of round 1"):
            step_with(optimizer, weight)

    run_all(cluster, work)


def test_parameters_without_names_are_called_by_position(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(session: Session) -> list[str]:
        RemoteOptimizer(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), session=session)
        return list(session.client.run.plan.parameter)

    assert run_all(cluster, train)[0] == ["group0.parameter0", "group0.parameter1"]
    assert capsys.readouterr().err.count("2 parameters have no names") == 2  # once a trainer


def random_states() -> list[Any]:
    return [
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    ]


def test_repeated_requests_draw_no_random_numbers_of_the_script(own_cluster: StartCluster) -> None:
    cluster, before = own_cluster(pservers=1, trainers=1, durability="log"), random_states()
    with Session(coordinator=cluster.address, rank=0, world_size=1) as session:
        weight, optimizer = wrap_weight(session, 4)
        step_with(optimizer, weight)
        cluster.pservers[0].signal(SIGKILL)
        cluster.pservers[0].wait(10)
        cluster.start_pserver(0)
        step_with(optimizer, weight)
        assert weight.tolist() == [-2.0] * 4
    assert random_states() == before
