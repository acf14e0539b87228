"""Means over the trainers: of parameters after local steps (local SGD, DiLoCo), and of float buffers in every step."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import assert_close, run_all, seeded, step_with, wrap_model, wrap_weight

pytestmark = pytest.mark.cluster
STEPS = 6
ROUNDING = 1e-6
LOCAL = "1.num_batches_tracked"


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(min_block_size=2, on_trainer_loss="fail")


def set_gradient(weight: nn.Parameter, rank: int, step: int) -> None:
    weight.grad = torch.randn(20, generator=torch.Generator().manual_seed(100 * step + rank))


def make_inner(weight: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.Adam([("weight", weight)], lr=0.1)


def oracle(local_steps: int, outer: Callable[[nn.Parameter], torch.optim.Optimizer]) -> Tensor:
    """Train in one process: every trainer's own copy, and one outer optimizer on the mean of the differences."""
    center = nn.Parameter(torch.zeros(20))
    outer_optimizer = outer(center)
    copies = [nn.Parameter(torch.zeros(20)) for _ in range(2)]
    inner = [make_inner(copy) for copy in copies]
    for step in range(1, STEPS + 1):
        for rank in range(2):
            set_gradient(copies[rank], rank, step)
            inner[rank].step()
        if step % local_steps == 0:
            differences = [center.detach() - copy.detach() for copy in copies]
            center.grad = (differences[0] + differences[1]) * 0.5
            outer_optimizer.step()
            with torch.no_grad():
                for copy in copies:
                    copy.copy_(center)
    return center.detach()


def take_local_steps(session: Session, **arguments: object) -> Tensor:
    weight = nn.Parameter(torch.zeros(20))
    outer = arguments.pop("outer", None)
    if callable(outer):
        arguments["outer"] = outer(weight)
    optimizer = RemoteOptimizer(make_inner(weight), session=session, **arguments)
    for step in range(1, STEPS + 1):
        set_gradient(weight, session.rank, step)
        optimizer.step()
    assert optimizer.round == STEPS // session.client.settings.local_steps
    return weight.detach().clone()


def test_local_sgd_averages_parameters(cluster: LocalCluster) -> None:
    expected = oracle(3, lambda p: torch.optim.SGD([p], lr=1.0, fused=True))
    for actual in run_all(cluster, partial(take_local_steps, local_steps=3)):
        assert torch.equal(actual, expected)


def test_diloco_with_an_outer_optimizer_and_by_settings(cluster: LocalCluster) -> None:
    def make_outer(weight: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True, fused=True)

    expected = oracle(2, make_outer)
    for arguments in ({"outer": make_outer}, {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}):
        for actual in run_all(cluster, partial(take_local_steps, local_steps=2, **arguments)):
            assert torch.equal(actual, expected)


def test_an_outer_optimizer_of_other_parameters_is_refused(cluster: LocalCluster) -> None:
    def work(session: Session) -> None:
        weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        outer = torch.optim.SGD([other], lr=1.0)
        with pytest.raises(BadModel, match="must have the parameters of the inner one"):
            RemoteOptimizer(make_inner(weight), session=session, local_steps=2, outer=outer)

    run_all(cluster, work)


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.extended
def test_where_nothing_is_averaged_each_trainer_moves_its_share(own_cluster: StartCluster, mode: str) -> None:
    """All pull towards 1; if each moved the parameters by its whole difference, they would end far beyond."""

    def work(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 20, lr=0.4, local_steps=4)
        for _ in range(40):
            step_with(optimizer, weight, value=weight[0].item() - 1)
        return weight[0].item()

    for value in run_all(own_cluster(trainers=4, mode=mode, min_block_size=4), work):
        assert value == pytest.approx(1, abs=0.1)


# ---------------------------------------------------------------------- buffers


def make_model() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), 1, 1.0)


def compute(model: nn.Module, step: int, rank: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)) + 3 * rank
    model(inputs).square().sum().backward()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_as_expected(found: list[list[dict[str, Tensor]]]) -> None:
    """Compare with models in one process, whose buffers are averaged after each step; the weights stand still."""
    models = [make_model() for _ in range(2)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            compute(model, step, rank)
        for name, _ in models[0].named_buffers():
            if name != LOCAL:
                every = [dict(model.named_buffers())[name] for model in models]
                mean = torch.stack(every).mean(0)
                for one in every:
                    one.copy_(mean)
        for rank, model in enumerate(models):
            assert_close(found[rank][step], buffers_of(model), ROUNDING, ROUNDING)


def train_buffers(session: Session, **arguments: Any) -> list[dict[str, Tensor]]:
    model = make_model()
    optimizer = wrap_model(session, model, lr=0.0, **arguments)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        compute(model, step, session.rank)
        optimizer.step()
        found.append(buffers_of(model))
    return found


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("ps", {"overlap": True, "bucket_bytes": 50}),
        ("ps", {"push_type": "topk", "bucket_bytes": 50}),
        pytest.param("ring", {}, marks=pytest.mark.ring),
    ],
    ids=str,
)
def test_buffers_become_their_mean_in_every_step(
    cluster: LocalCluster, ring: LocalCluster, strategy: str, arguments: dict[str, Any]
) -> None:
    assert_as_expected(run_all(ring if strategy == "ring" else cluster, partial(train_buffers, **arguments)))


def test_the_state_of_an_optimizer_leaves_buffers_out(cluster: LocalCluster) -> None:
    def work(session: Session) -> dict[str, Any]:
        model = make_model()
        optimizer = RemoteOptimizer(torch.optim.Adam(model.parameters()), model=model, session=session)
        compute(model, 0, session.rank)
        optimizer.step()
        return optimizer.state_dict()

    fresh = torch.optim.Adam(make_model().parameters())
    for saved in run_all(cluster, work):
        assert list(saved["state"]) == saved["param_groups"][0]["params"]
        fresh.load_state_dict(saved)


@pytest.mark.clip
def test_buffers_are_no_part_of_the_norm_and_not_clipped(cluster: LocalCluster) -> None:
    def work(session: Session) -> tuple[float | None, float]:
        model = make_model()
        optimizer = wrap_model(session, model, lr=0.0, max_grad_norm=0.5)
        compute(model, 0, 0)
        own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm().item()
        optimizer.step()
        return optimizer.grad_norm, own

    for norm, own in run_all(cluster, work):
        assert norm == pytest.approx(own)


@pytest.mark.parametrize(
    ("settings", "arguments", "margin"),
    [
        ({}, {"local_steps": 2}, 0.01),
        ({}, {"overlap": True, "overlap_pulls": True}, 0.01),
        ({}, {"pull_type": "int8"}, 0.01),
        pytest.param({"max_delay": 2}, {}, 1.1, marks=pytest.mark.extended),
        ({"mode": "async", "compensation": "dc"}, {}, 1.1),  # the last steps may be those of one trainer
    ],
    ids=str,
)
def test_a_model_that_is_read_has_statistics_of_its_weights(
    shared_cluster: StartCluster, settings: dict[str, Any], arguments: dict[str, Any], margin: float
) -> None:
    """Train with inputs whose mean is 1 on one trainer and 3 on the other, and read the mean from the model."""
    exported: list[dict[str, Tensor]] = []
    cluster = shared_cluster(**settings)

    def work(session: Session) -> None:
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5))
        optimizer = wrap_model(session, model, lr=0.01, **arguments)
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.tensor([[-1.0], [1.0]]) + 1 + 2 * session.rank).square().sum().backward()
            optimizer.step()
        optimizer.synchronize()
        session.report(done=1)
        exported.append(load(b"".join(cluster.view.model())))

    run_all(cluster, work)
    assert exported[-1]["0.running_mean"].item() == pytest.approx(2, abs=margin)


def test_a_skipped_round_leaves_the_means_of_the_round_before(own_cluster: StartCluster) -> None:
    def work(session: Session) -> list[dict[str, Tensor]]:
        model, found = make_model(), []
        optimizer = wrap_model(session, model, lr=0.0)
        for step in range(3):
            optimizer.zero_grad()
            compute(model, step, session.rank)
            if step == 1 and session.rank == 1:
                model[0].weight.grad.fill_(float("nan"))
            optimizer.step()
            found.append({name: buffer for name, buffer in buffers_of(model).items() if name != LOCAL})
        return found

    cluster = own_cluster(nonfinite="skip_round", on_trainer_loss="fail")
    for first, skipped, third in run_all(cluster, work):
        for name in first:
            assert torch.equal(skipped[name], first[name])
            assert not torch.equal(third[name], first[name])


def test_buffers_that_are_replaced_infinite_or_of_16_bits(cluster: LocalCluster) -> None:
    def work(session: Session) -> list[Tensor]:
        model = nn.Linear(2, 1)
        model.register_buffer("level", torch.zeros(3))
        model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        model.register_buffer("short", torch.zeros(2, dtype=torch.bfloat16))
        optimizer = wrap_model(session, model, lr=0.0)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            model.level = model.level + (float("nan") if (session.rank, step) == (1, 2) else session.rank + 1.0)
            model.short.add_(session.rank)
            optimizer.step()
        return [model.level, model.mask, model.short]

    for level, mask, short in run_all(cluster, work):
        assert level.tolist() == [1.5 + 1.5 + 0.5] * 3  # the one that is not a number counts as it was before
        assert mask.tolist() == [[0, -torch.inf], [0, 0]]
        assert short.tolist() == [1.5, 1.5]


def test_a_buffer_that_becomes_another_one_is_refused(cluster: LocalCluster) -> None:
    def work(session: Session) -> None:
        model = make_model()
        optimizer = wrap_model(session, model, lr=0.0)
        model[1].running_mean = torch.zeros(5)
        with pytest.raises(BadModel, match=r"1\.running_mean.*has another shape or dtype"):
            optimizer.step()

    run_all(cluster, work)


# ---------------------------------------------------------------------- the choice of buffers


class Queue(nn.Module):
    """A model with a queue of unit vectors and its pointer, as MoCo has them, beside statistics and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.eye(4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("freqs", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("eighth", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("short", torch.tensor([3], dtype=torch.uint16))
        self.register_buffer("adjacency", torch.eye(3).to_sparse())

    def enqueue(self, step: int, rank: int) -> Tensor:
        key = torch.randn(4, generator=torch.Generator().manual_seed(10 * step + rank))
        self.queue[step % 4] = key / key.norm()
        self.pointer += 1
        return self.queue.clone()


def train_queue(session: Session, **arguments: Any) -> tuple[list[Tensor], list[Tensor], Queue]:
    """Return the queue as this trainer wrote it in each step, and as it was after the step, and the model."""
    model = seeded(Queue())
    optimizer = wrap_model(session, model, **arguments)
    written, after = [], []
    for step in range(4):
        optimizer.zero_grad()
        model.norm(model.linear(torch.randn(8, 4))).square().sum().backward()
        written.append(model.enqueue(step, session.rank))
        optimizer.step()
        after.append(model.queue.clone())
    return written, after, model


WARNING = "trainers write different values to 1 of the model's buffers"


@pytest.mark.parametrize("strategy", ["ps", pytest.param("ring", marks=pytest.mark.ring)])
def test_a_queue_can_be_that_of_the_lowest_rank_or_stay_where_it_is(
    cluster: LocalCluster, ring: LocalCluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = partial(run_all, ring if strategy == "ring" else cluster)
    (written, *_), *_ = all_trainers = run(partial(train_queue, buffers={"queue*": "lowest_rank"}))
    for _, after, model in all_trainers:
        assert all(map(torch.equal, after, written))
        assert torch.equal(model.norm.running_mean, all_trainers[0][2].norm.running_mean)
    for written, after, _ in run(partial(train_queue, buffers={"queue": "leave"})):
        assert all(map(torch.equal, after, written))
    assert WARNING not in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["ps", pytest.param("ring", marks=pytest.mark.ring)])
def test_different_values_in_a_buffer_without_statistics_are_a_warning(
    cluster: LocalCluster, ring: LocalCluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = partial(run_all, ring if strategy == "ring" else cluster)
    run(train_queue)
    said = capsys.readouterr().err
    assert said.count(WARNING) == 2  # once a trainer
    assert "buffers={'queue': 'lowest_rank'}" in said
    run(partial(train_queue, buffers={"queue": "average"}))
    run(train_buffers)
    assert "write different values" not in capsys.readouterr().err


def test_choices_of_buffers_that_cannot_be_are_refused(cluster: LocalCluster) -> None:
    def work(session: Session) -> None:
        model, rotated = Queue(), nn.ParameterDict({"w": torch.ones(2, dtype=torch.cfloat)})
        model.register_buffer("q64", torch.ones(2, dtype=torch.float64))
        for choices, message in (
            ({"queu": "leave"}, "'queu' matches no buffer that is exchanged. Did you mean 'queue'?"),
            ({"pointer": "lowest_rank"}, "'pointer' is torch.int64. Exchanged are dense float32"),
            ({"q*64": "lowest_rank"}, "'q64' is torch.float64. Exchanged are dense float32"),
            ({"queue": "first"}, "'first' is no choice for buffers 'queue'; use average, lowest_rank or leave"),
        ):
            with pytest.raises(BadModel, match=re.escape(message)):
                wrap_model(session, model, buffers=choices)
        with pytest.raises(BadModel, match="buffers need model=model"):
            RemoteOptimizer(torch.optim.SGD(model.parameters()), session=session, buffers={"queue": "leave"})
        with pytest.raises(BadModel, match=r"'w' is torch.complex64, .* torch\.view_as_real"):
            wrap_model(session, rotated)

    run_all(cluster, work)
