"""Gradients that leave while backward still runs: the same bits as without, and a script that changes them is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from .conftest import Carrier
from .faulty_run import FaultyRun, expected_result
from .parity_model import assert_identical, run_trainers

pytestmark = [pytest.mark.cluster, pytest.mark.overlap]

STEPS = 8
WORDS, WIDTH = 50, 24
SMALL = {"bucket_bytes": 2000, "min_block_size": 100}  # many buckets, and parameters that are cut

EARLY = {"GRADPOST_OVERLAP": "true", "GRADPOST_BUCKET_BYTES": "500"}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lonely(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=1, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


class Net(nn.Module):
    """Tied, frozen, never used, and used now and then: whatever a model may do to its parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.never = nn.Parameter(torch.ones(40))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.3, 0.3, generator=generator)

    def forward(self, words: Tensor, step: int) -> Tensor:
        hidden = torch.tanh(self.hidden(self.words(words)))
        if step % 3 == 1:
            hidden = hidden + self.sometimes(hidden)
        found: Tensor = self.out(torch.relu(self.frozen(hidden)))
        return found


def loss_of(model: Net, step: int, rank: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    words = torch.randint(0, WORDS, (16,), generator=generator)
    return nn.functional.cross_entropy(model(words, step), (words + 1) % WORDS)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_locally(kind: str, num_trainers: int = 2, num_parts: int = 1) -> dict[str, Tensor]:
    """The oracle: one process that adds the trainers' gradients in the order of ranks, and divides once."""
    model = Net()
    # A group each: fused SGD fails in the step in which some parameters of a group get their first momentum.
    optimizer = OPTIMIZERS[kind]([{"params": [parameter]} for parameter in model.parameters()])
    for group in optimizer.param_groups:
        group["fused"] = True
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(num_trainers):
            optimizer.zero_grad()
            for part in range(num_parts):
                loss_of(model, step, rank, part).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] * (1 / num_trainers) if name in sums else None
        optimizer.step()
    return values(model)


def train(session: Session, *, kind: str = "AdamW", **arguments: Any) -> dict[str, Tensor]:
    model = Net(seed=session.rank)
    optimizer = RemoteOptimizer(OPTIMIZERS[kind](model.parameters()), model=model, session=session, **arguments)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, session.rank).backward()
        optimizer.step()
    optimizer.synchronize()
    return values(model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bits_are_those_of_one_process(cluster: LocalCluster, kind: str) -> None:
    work = partial(train, kind=kind, overlap=True)
    for actual in run_trainers(cluster.address, [work, work], **SMALL):
        assert_identical(actual, train_locally(kind))


@pytest.mark.parametrize("kind", ["int8", "bfloat16", "topk"])
def test_fewer_bytes_are_the_same_ones(cluster: LocalCluster, kind: str) -> None:
    with_overlap, without = (partial(train, overlap=overlap, push_type=kind) for overlap in (True, False))
    overlapped = run_trainers(cluster.address, [with_overlap] * 2, **SMALL)
    assert_identical(overlapped[0], overlapped[1])
    assert_identical(overlapped[0], run_trainers(cluster.address, [without] * 2, **SMALL)[0])


def test_gradients_have_arrived_before_backward_is_over(lonely: LocalCluster) -> None:
    """The first layer's backward waits until the pserver has the last one's gradient."""
    arrived = threading.Event()

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            assert arrived.wait(timeout=20), "nothing has left while backward was running"
            return gradient * 2

    def work(session: Session) -> None:
        model = nn.ModuleList([nn.Linear(30, 30) for _ in range(3)])
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, session=session, overlap=True
        )
        push = session.client.push

        async def push_and_tell(*arguments: Any) -> bool:
            is_finite = await push(*arguments)
            arrived.set()
            return is_finite

        session.client.push = push_and_tell  # type: ignore[method-assign]
        hidden = torch.ones(2, 30)
        for layer in model:
            hidden = Wait.apply(layer(hidden)) if layer is model[0] else layer(hidden)
        hidden.sum().backward()
        optimizer.step()

    run_trainers(lonely.address, [work], bucket_bytes=1000)


@pytest.mark.parametrize("by_number", [False, True])
def test_accumulated_gradients_leave_once(cluster: LocalCluster, by_number: bool) -> None:
    def work(session: Session) -> dict[str, Tensor]:
        model = Net(seed=session.rank)
        optimizer = RemoteOptimizer(
            OPTIMIZERS["momentum"](model.parameters()),
            model=model,
            session=session,
            overlap=True,
            accumulate_steps=3 if by_number else None,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            if by_number:
                for part in range(3):
                    loss_of(model, step, session.rank, part).backward()
            else:
                with optimizer.accumulate():
                    for part in range(2):
                        loss_of(model, step, session.rank, part).backward()
                loss_of(model, step, session.rank, 2).backward()
            optimizer.step()
        return values(model)

    for actual in run_trainers(cluster.address, [work, work], **SMALL):
        assert_identical(actual, train_locally("momentum", num_parts=3))


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ring), "ps"])
def test_passes_that_were_for_nothing_do_not_count(strategy: str) -> None:
    """The remainder of an epoch is dropped, and so is a pass in the middle."""

    def work(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(100))
        optimizer = RemoteOptimizer(
            torch.optim.SGD([weight], lr=1.0), session=session, overlap=True, accumulate_steps=3
        )
        for num_passes in (3, 2, 3, 1, 3):
            for _ in range(num_passes):
                weight.sum().backward()  # type: ignore[no-untyped-call]
            if num_passes == 3:
                optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"the session is closed.*call step\(\) before close\(\)"):
            session.close() or optimizer.step()  # type: ignore[func-returns-value]
        return float(weight.unique().item())

    with LocalCluster(pservers=int(strategy == "ps"), trainers=2, strategy=strategy) as cluster:
        assert run_trainers(cluster.address, [work, work]) == [-9.0, -9.0]


def test_what_is_done_to_a_gradient_that_has_left_is_refused(lonely: LocalCluster) -> None:
    def begin(session: Session) -> tuple[Net, RemoteOptimizer]:
        model = Net()
        optimizer = RemoteOptimizer(OPTIMIZERS["AdamW"](model.parameters()), model=model, session=session)
        loss_of(model, 0, 0).backward()
        return model, optimizer

    def another_pass(session: Session) -> None:
        model, _ = begin(session)
        with raises_code("gradient_changed", match=r"another backward pass came to '[\w.]+'.*accumulate_steps"):
            loss_of(model, 0, 0).backward()

    def clipping(session: Session) -> None:
        model, optimizer = begin(session)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with raises_code("gradient_changed", match=r"gradient of '[\w.]+' was changed after it had left"):
            optimizer.step()

    def forgetting(session: Session) -> None:
        _, optimizer = begin(session)
        optimizer.zero_grad()
        with raises_code("gradient_changed", match="was changed after it had left"):
            optimizer.step()

    def scaling(session: Session) -> None:
        _, optimizer = begin(session)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        with pytest.raises(BadModel, match=r"overlap=True.*GradScaler"):
            scaler.step(optimizer)

    for work in (another_pass, clipping, forgetting, scaling):
        run_trainers(lonely.address, [work], overlap=True)


def test_local_steps_have_nothing_to_send_early(lonely: LocalCluster) -> None:
    def work(session: Session) -> None:
        with pytest.raises(BadModel, match="local_steps with overlap"):
            RemoteOptimizer(OPTIMIZERS["AdamW"](Net().parameters()), session=session)

    run_trainers(lonely.address, [work], overlap=True, local_steps=2)


def test_a_parameter_may_be_thawed(lonely: LocalCluster) -> None:
    def work(session: Session, *, overlap: bool) -> dict[str, Tensor]:
        model = Net()
        optimizer = RemoteOptimizer(
            OPTIMIZERS["AdamW"](model.parameters()), model=model, session=session, overlap=overlap
        )
        for step in range(STEPS):
            model.frozen.requires_grad_(step >= 3)
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
        return values(model)

    [overlapped], [other] = (
        run_trainers(lonely.address, [partial(work, overlap=overlap)], **SMALL) for overlap in (True, False)
    )
    assert_identical(overlapped, other)


def test_a_model_goes_on_when_the_session_is_closed(lonely: LocalCluster) -> None:
    model = Net()

    def work(session: Session) -> None:
        optimizer = RemoteOptimizer(OPTIMIZERS["AdamW"](model.parameters()), session=session, overlap=True)
        loss_of(model, 0, 0).backward()
        optimizer.step()

    run_trainers(lonely.address, [work])
    for _ in range(2):
        loss_of(model, 0, 0).backward()


def push_given_gradients(session: Session, **arguments: Any) -> dict[str, Tensor]:
    """Their gradients do not depend on the parameters, which with `max_delay` are of one round or of another."""
    model = Net()
    optimizer = RemoteOptimizer(OPTIMIZERS["AdamW"](model.parameters()), model=model, session=session, **arguments)
    generator = torch.Generator().manual_seed(session.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        losses = [(p * torch.randn(p.shape, generator=generator)).sum() for p in trained]
        torch.stack(losses).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    return values(model)


@pytest.mark.extended
def test_delayed_steps_overlap_too(carrier: Carrier) -> None:
    with LocalCluster(pservers=2, trainers=2, **carrier, max_delay=1, on_trainer_loss="fail") as cluster:
        overlapped, other = (
            run_trainers(cluster.address, [partial(push_given_gradients, overlap=overlap)] * 2, **SMALL)
            for overlap in (True, False)
        )
    assert_identical(overlapped[0], overlapped[1])
    assert_identical(overlapped[0], other[0])


@pytest.mark.extended
def test_the_asynchronous_mode_overlaps_too(carrier: Carrier) -> None:
    """One trainer alone, whose every step is applied before it pulls: as in one process."""
    with LocalCluster(
        pservers=2, trainers=1, **carrier, mode="async", wait_for_apply=True, on_trainer_loss="fail"
    ) as cluster:
        [actual] = run_trainers(cluster.address, [partial(train, kind="AdamW", overlap=True)], **SMALL)
    assert_identical(actual, train_locally("AdamW", num_trainers=1))


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_processes_may_die_while_gradients_leave(carrier: Carrier) -> None:
    with FaultyRun(100, **carrier, environment=EARLY) as run:
        run.wait_for_round(10)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        run.wait_for_round(30)
        run.kill(run.cluster.trainers[1])
        run.start_trainer(1)
        assert run.results() == [expected_result(100)] * 2


@pytest.mark.extended
@pytest.mark.timeout(180)
@pytest.mark.parametrize("pulls", [pytest.param("false", marks=pytest.mark.soak), "true"])
def test_the_run_may_go_back_in_the_middle_of_a_pass(carrier: Carrier, pulls: str) -> None:
    """Whatever of its pass a trainer has done when the run goes back, that gradient is in no round."""
    environment = {**EARLY, "GRADPOST_OVERLAP_PULLS": pulls}
    with FaultyRun(400, **carrier, environment=environment) as run:
        for number, round_ in enumerate((15, 40, 65), start=1):
            run.wait_for_round(round_)
            made = run.make_checkpoint()
            run.wait_for_round(made + 10)
            answer = httpx.post(f"{run.cluster.address}/v1/rollback", json={"round": made}, timeout=30)
            assert answer.is_success, answer.text
            run.wait_for_line("steps of this trainer are lost", number, of="trainer 0")
        assert run.results() == [expected_result(400)] * 2
