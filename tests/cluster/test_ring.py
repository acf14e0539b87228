"""Strategy ring: the same script and the same results without pservers, and all of torch's optimizers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel, ContributionConflict, NonFiniteGradient
from trainer_client import RemoteOptimizer, Session
from trainer_client.ring.steps import RingSteps
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from .host_script import Wait
from .parity_model import assert_identical, change_rates, make_optimizer, make_parameters, run_trainers, set_gradients
from .test_overlap import OPTIMIZERS, Net, loss_of, train_locally, values
from .up_support import ROOT, RunningUp

pytestmark = [pytest.mark.cluster, pytest.mark.ring]

STEPS = 20
UP = ["--strategy", "ring", "--trainers", "2", "--", "python", "examples/digits.py"]
SMALL = {"bucket_bytes": 2000}  # many buckets
ROUNDING = 2e-6  # of values around 1


@pytest.fixture(scope="module")
def ring() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=0, trainers=2, strategy="ring", lease_seconds=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def skipping() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=0, trainers=2, strategy="ring", lease_seconds=2, nonfinite="skip_round") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pservers() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


def train(session: Session, *, name: str) -> dict[str, Tensor]:
    """Gradients of its own in each trainer, one parameter without any in some steps, and other rates in every step."""
    parameters = make_parameters(seed=session.rank)
    optimizer = RemoteOptimizer(make_optimizer(name, parameters, local=False), session=session)
    for step in range(STEPS):
        set_gradients(parameters, step, session.rank)
        if session.rank == 1 and step % 4 == 2:
            parameters["bias"].grad = None
        optimizer.step()
        change_rates(optimizer, step)
    return values_of(parameters)


def values_of(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize("name", ["SGD", "SGD-momentum", "Adam-amsgrad", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_the_results_are_those_of_the_pservers(ring: LocalCluster, pservers: LocalCluster, name: str) -> None:
    work = partial(train, name=name)
    actual = run_trainers(ring.address, [work, work], **SMALL)
    assert_identical(actual[0], actual[1])
    expected = run_trainers(pservers.address, [work, work])[0]
    for key, value in expected.items():
        torch.testing.assert_close(actual[0][key], value, rtol=ROUNDING, atol=ROUNDING)


def train_net(session: Session, *, kind: str = "AdamW", **arguments: Any) -> dict[str, Tensor]:
    model = Net(seed=session.rank)
    optimizer = RemoteOptimizer(OPTIMIZERS[kind](model.parameters()), model=model, session=session, **arguments)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step, session.rank).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_overlap_changes_no_bit(ring: LocalCluster, kind: str) -> None:
    """Of a model with tied, frozen and unused parameters."""
    early, late = (partial(train_net, kind=kind, overlap=overlap) for overlap in (True, False))
    overlapped = run_trainers(ring.address, [early, early], **SMALL)
    assert_identical(overlapped[0], overlapped[1])
    assert_identical(overlapped[0], run_trainers(ring.address, [late, late], **SMALL)[0])
    for key, value in train_locally(kind).items():
        torch.testing.assert_close(overlapped[0][key], value, rtol=ROUNDING, atol=ROUNDING)


def test_buckets_go_round_while_backward_runs(ring: LocalCluster) -> None:
    """The first layer's backward waits for the sum of the third one's gradients; the last one is frozen."""

    def work(session: Session) -> None:
        model = nn.ModuleList([nn.Linear(30, 30) for _ in range(4)])
        model[3].requires_grad_(False)
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, session=session, overlap=True
        )
        steps = optimizer._steps
        assert isinstance(steps, RingSteps)
        hidden = torch.ones(2, 30)
        for layer in model:
            hidden = layer(hidden)
            if layer is model[0]:
                hidden = Wait.apply(hidden, lambda: steps._group.collectives.has_ended(0))
        hidden.sum().backward()
        optimizer.step()

    run_trainers(ring.address, [work, work], bucket_bytes=1000)


def test_all_cut_as_the_lowest_rank_does(ring: LocalCluster) -> None:
    def work(session: Session, bucket_bytes: int) -> int:
        model = nn.ModuleList([nn.Linear(30, 30) for _ in range(3)])
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), session=session, bucket_bytes=bucket_bytes
        )
        model[0].weight.grad = torch.ones(30, 30)
        optimizer.step()
        assert isinstance(optimizer._steps, RingSteps)
        return len(optimizer._steps._buckets)

    assert run_trainers(ring.address, [partial(work, bucket_bytes=n) for n in (4000, 10_000_000)]) == [3, 3]


def test_numbers_that_differ_end_the_run_before_parameters_do(ring: LocalCluster) -> None:
    """As those of a schedule that looks at the trainer's own loss."""
    values = []

    def work(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(10))
        optimizer = RemoteOptimizer(torch.optim.SGD([weight], lr=1.0), session=session)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        try:
            for step in range(9):
                weight.grad = torch.ones(10)
                optimizer.step()
                schedule.step(1.0 + step * (session.rank - 0.1))
        finally:
            values.append(weight.unique().tolist())

    with pytest.raises(BadModel, match="learning rates, are not the same on all trainers in round 3"):
        run_trainers(ring.address, [work, work])
    assert values == [[-2.0], [-2.0]]


def test_a_gradient_that_has_left_may_not_change(ring: LocalCluster) -> None:
    def work(session: Session) -> None:
        model = nn.Linear(20, 20)
        optimizer = RemoteOptimizer(OPTIMIZERS["AdamW"](model.parameters()), session=session, overlap=True)
        model(torch.ones(2, 20)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with raises_code("gradient_changed"):
            optimizer.step()
        with pytest.raises(ContributionConflict, match="the script has to end"):
            model(torch.ones(2, 20)).sum().backward()

    run_trainers(ring.address, [work, work], bucket_bytes=1000)


def test_everybody_starts_from_the_lowest_rank(ring: LocalCluster) -> None:
    """Frozen parameters, buffers of all types and those in other memory formats included."""

    def work(session: Session) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
        model[3].requires_grad_(False)
        model.to(memory_format=torch.channels_last)
        model.register_buffer("flags", torch.tensor([session.rank == 0, True]))
        model.register_buffer("brief", torch.full((), float(session.rank), dtype=torch.bfloat16))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.dtype != torch.bool:
                    tensor.fill_(session.rank + 5)
        RemoteOptimizer(torch.optim.SGD(model[:2].parameters(), lr=0.1), model=model, session=session)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    first, second = run_trainers(ring.address, [work, work])
    assert_identical(first, second)
    assert {tensor.double().mean().item() for tensor in second.values()} == {5.0, 1.0}


def test_16_bits_are_added_up_in_32_and_the_scripts_gradients_stay(ring: LocalCluster) -> None:
    def work(session: Session) -> Tensor:
        weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        weight.grad = torch.full((4,), 256.0 if session.rank == 0 else 2.0, dtype=torch.bfloat16)
        own = weight.grad
        assert isinstance(optimizer._steps, RingSteps)
        assert [bucket.flat.dtype for bucket in optimizer._steps._buckets] == [torch.float32]
        optimizer.step()
        assert weight.grad is own
        assert own[0] == (256 if session.rank == 0 else 2)
        return weight.detach()

    for weight in run_trainers(ring.address, [work, work]):
        assert weight.tolist() == [-129.0] * 4


@pytest.mark.parametrize("cls", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.ASGD])
def test_optimizers_that_mix_elements_will_do(ring: LocalCluster, cls: Any) -> None:
    def work(session: Session) -> dict[str, Tensor]:
        weight = nn.Parameter(torch.full((6, 4), float(session.rank)))
        optimizer = RemoteOptimizer(cls([("weight", weight)], lr=0.1), session=session)
        for step in range(3):
            weight.grad = torch.arange(24.0).reshape(6, 4) * (session.rank + step)
            optimizer.step()
            if session.rank == 0:  # what has been loaded is compared with what has not
                optimizer.load_state_dict(optimizer.state_dict())
        state = optimizer.state_dict()["state"][0]
        return {"weight": weight.detach(), **{k: v for k, v in state.items() if isinstance(v, Tensor)}}

    weight = nn.Parameter(torch.zeros(6, 4))
    local = cls([("weight", weight)], lr=0.1)
    for step in range(3):
        weight.grad = torch.arange(24.0).reshape(6, 4) * (step + 0.5)
        local.step()
    for actual in run_trainers(ring.address, [work, work]):
        assert len(actual) > 1
        torch.testing.assert_close(actual["weight"], weight.detach())


def test_a_state_dict_is_complete_and_can_be_loaded(ring: LocalCluster) -> None:
    """Half the steps, and the other half in another run by an optimizer that has loaded all of it."""

    def some_steps(session: Session, part: range, begin: dict[str, Any] | None = None) -> dict[str, Any]:
        parameters = make_parameters()
        if begin is not None:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(begin["values"][name])
        optimizer = RemoteOptimizer(make_optimizer("AdamW", parameters, local=False), session=session)
        groups = optimizer.param_groups
        if begin is not None:
            optimizer.load_state_dict(begin["optimizer"])
        assert optimizer.param_groups is groups  # which a schedule may hold
        for step in part:
            set_gradients(parameters, step, session.rank)
            optimizer.step()
            change_rates(optimizer, step)
        return {"values": values_of(parameters), "optimizer": optimizer.state_dict()}

    whole = run_trainers(ring.address, [partial(some_steps, part=range(6))] * 2)
    first = run_trainers(ring.address, [partial(some_steps, part=range(3))] * 2)
    second = run_trainers(ring.address, [partial(some_steps, part=range(3, 6), begin=begin) for begin in first])
    assert_identical(second[0]["values"], whole[0]["values"])


def test_what_a_ring_cannot_do_is_refused(ring: LocalCluster) -> None:
    def refused(session: Session, code: str, match: str, **arguments: Any) -> None:
        optimizer = arguments.pop("optimizer", torch.optim.SGD)
        model = nn.Linear(4, 2)
        with raises_code(code, match=match):
            RemoteOptimizer(optimizer(model.parameters(), lr=0.1), model=model, session=session, **arguments)

    for code, match, arguments in (
        ("bad_model", "local_steps and overlap_pulls need pservers", {"local_steps": 2}),
        ("bad_model", "local_steps and overlap_pulls need pservers", {"overlap_pulls": True, "overlap": True}),
        ("bad_model", "push_type would have no effect with strategy ring", {"push_type": "int8"}),
        ("unsupported_optimizer", "LBFGS evaluates a closure several times", {"optimizer": torch.optim.LBFGS}),
    ):
        work = partial(refused, code=code, match=match, **arguments)
        run_trainers(ring.address, [work, work])
    with raises_code("mode_mismatch", match="strategy"):
        Session(coordinator=ring.address, strategy="ps")


# ---------------------------------------------------------------------- NaN and infinity


def nan_in_round(session: Session, optimizer: RemoteOptimizer, weight: nn.Parameter, bad: int) -> None:
    """Trainer 1's gradient is not finite in one round; it mends that when it is told."""
    for round_ in range(1, 5):
        weight.grad = torch.full_like(weight, float(round_))
        if session.rank == 1 and round_ == bad:
            weight.grad[1] = float("nan")
            try:
                optimizer.step()
            except NonFiniteGradient as error:
                assert "trainer 1 has NaN or infinity in the gradient of 'weight' in round 2" in str(error)  # noqa: PT017
                weight.grad[1] = float(round_)
                optimizer.step()
        else:
            optimizer.step()
        assert optimizer.round == round_


@pytest.mark.parametrize("overlap", [False, True])
def test_under_reject_all_wait_for_another_gradient(ring: LocalCluster, overlap: bool) -> None:
    def work(session: Session) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session, overlap=overlap)
        nan_in_round(session, optimizer, weight, bad=2)
        found: list[float] = weight.detach().tolist()
        return found

    assert run_trainers(ring.address, [work, work]) == [[-10.0] * 4] * 2


def test_under_skip_round_nobody_steps(skipping: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    def work(session: Session) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        nan_in_round(session, optimizer, weight, bad=2)
        found: list[float] = weight.detach().tolist()
        return found

    assert run_trainers(skipping.address, [work, work]) == [[-8.0] * 4] * 2
    said = "round 2 was skipped by all trainers: NaN or infinity in gradients of trainer 1"
    assert capsys.readouterr().err.count(said) == 2


def test_an_overflow_of_one_gradscaler_skips_the_step_of_all(
    skipping: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of torch's own, whose scales may drift apart: each trainer says so once."""

    def work(session: Session) -> list[float]:
        model = nn.Linear(4, 2)
        optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.5), session=session)
        start = model.bias.detach().clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for iteration in range(1, 7):
            optimizer.zero_grad()
            factor = 1e38 if session.rank == 1 and iteration == 3 else 1.0
            scaler.scale((model(torch.ones(3, 4)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.round == iteration
        found: list[float] = (model.bias.detach() - start).tolist()
        return found

    for moved in run_trainers(skipping.address, [work, work]):
        assert moved == pytest.approx([-0.5 * 3 * 5] * 2)
    assert capsys.readouterr().err.count("torch's GradScaler backs off alone") == 2


# ---------------------------------------------------------------------- the coordinator


def test_the_coordinator_shows_the_run(ring: LocalCluster) -> None:
    at_ten, looked = threading.Barrier(3), threading.Barrier(3)

    def work(session: Session) -> str:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        for _ in range(10):
            weight.grad = torch.ones(4)
            optimizer.step()
        session.report(loss=0.5, accuracy=0.9)
        optimizer.summary()  # whose heartbeat brings it
        at_ten.wait(30)
        looked.wait(30)
        return optimizer.summary().line()

    def look() -> None:
        at_ten.wait(30)
        try:
            status = ring.status()
            assert (status.state, status.round, status.num_pservers) == ("training", 10, 0)
            assert (status.num_parameters, status.parameter_bytes) == (1, 16)
            activity = httpx.get(f"{ring.address}/v1/activity").json()
            assert (activity["round"], activity["participants"]) == (10, [0, 1])
            for method, path, body in (
                ("GET", "/v1/parameters", None),
                ("GET", "/v1/parameters/weight", None),
                ("GET", "/v1/parameters/weight/statistics", None),
                ("GET", "/v1/model", None),
                ("POST", "/v1/checkpoints", None),
                ("POST", "/v1/controls/pause", None),
                ("POST", "/v1/rollback", {"round": 1}),
                ("POST", "/v1/trainers/1/evict", None),
            ):
                answer = httpx.request(method, ring.address + path, json=body, timeout=10)
                assert (answer.status_code, answer.json()["code"]) == (409, "no_pservers"), path
            assert httpx.get(f"{ring.address}/v1/checkpoints").json() == []
        finally:
            looked.wait(30)

    looking = threading.Thread(target=look)
    looking.start()
    lines = run_trainers(ring.address, [work, work])
    looking.join()
    assert all(line.startswith("trained: mode=sync transport=ring accuracy=0.9 rounds=10 ") for line in lines)


def test_training_outlives_the_coordinator() -> None:
    with LocalCluster(pservers=0, trainers=2, strategy="ring", lease_seconds=2) as cluster:
        stopped, back = threading.Barrier(3), threading.Barrier(3)

        def work(session: Session) -> int:
            weight = nn.Parameter(torch.zeros(4))
            optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
            for step in range(6):
                if step == 2:
                    stopped.wait(30)
                if step == 4:
                    back.wait(30)
                weight.grad = torch.ones(4)
                optimizer.step()
            return optimizer.round

        def restart() -> None:
            cluster.coordinator.stop()
            stopped.wait(30)
            cluster.restart_coordinator()
            back.wait(30)

        restarting = threading.Thread(target=restart)
        working = threading.Thread(target=lambda: rounds.extend(run_trainers(cluster.address, [work, work])))
        rounds: list[int] = []
        working.start()
        while cluster.status().state != "training":
            threading.Event().wait(0.05)
        restarting.start()
        working.join(60)
        restarting.join(60)
        assert rounds == [6, 6]
        assert cluster.status().state == "finished"


# ---------------------------------------------------------------------- gradpost up


@pytest.mark.extended
def test_up_trains_the_digits_without_a_pserver(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with RunningUp("--json", *UP, folder=tmp_path) as up:
        code, stdout, stderr = up.finish()
        assert up.has_left_nothing(), up.left()
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert (summary["state"], summary["transport"], summary["shards"]) == ("finished", "ring", [])
    assert summary["rounds"] == 8 * 23
    assert summary["results"]["accuracy"] >= 0.97
    assert "gradpost: 2 trainers around the coordinator" in stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--pservers 2", "num_pservers would have no effect with strategy ring"),
        ("--max-restarts 1", "a ring cannot go on without a trainer"),
        ("--durability log", "durability would have no effect with strategy ring"),
    ],
)
def test_up_says_what_has_no_effect(tmp_path: Path, flags: str, said: str) -> None:
    with RunningUp("--strategy", "ring", *flags.split(), "--", "true", folder=tmp_path) as up:
        code, _, stderr = up.finish()
    assert code == 2
    assert said in stderr
