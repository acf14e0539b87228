"""Training that tests of clusters share: seeded models, gradients and optimizers, and torch.optim as their oracle.

Trainers are threads of the test (`run_trainers`) or processes (training_script.py). The oracle is one process that adds
the trainers' gradients in the order of ranks and multiplies the sum once, as the pservers do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradpost import RemoteOptimizer, Session
from ps_protocol.optimizers import check_optimizer
from trainer_client.testing import LocalCluster

from . import training_script
from .training_script import digest_of
from .up_support import wait_until

T = TypeVar("T")
SMALL = {"bucket_bytes": 2000}  # many buckets

# What trainers without a RemoteOptimizer declare and push.
SGD = check_optimizer("SGD", [{"nesterov": False, "maximize": False}])
NUMBERS: list[Any] = [{"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}]

# ---------------------------------------------------------------------- trainers


def run_trainers(coordinator: str, work: Sequence[Callable[[Session], T]], **arguments: Any) -> list[T]:
    """Run one trainer a thread, each with a session of its own, and return what they return in the order of ranks."""

    def run(rank: int) -> T:
        with Session(coordinator=coordinator, rank=rank, world_size=len(work), **arguments) as session:
            return work[rank](session)

    with ThreadPoolExecutor(len(work)) as threads:
        return list(threads.map(run, range(len(work))))


def run_all(cluster: LocalCluster, work: Callable[[Session], T], **arguments: Any) -> list[T]:
    """Run the same work on all trainers of a cluster."""
    return run_trainers(cluster.address, [work] * cluster.num_trainers, **arguments)


def wrap_weight(
    session: Session, *shape: int, lr: float = 1.0, momentum: float = 0.0, **arguments: Any
) -> tuple[nn.Parameter, RemoteOptimizer]:
    """Return a parameter of zeros and an optimizer, SGD, that trains it."""
    weight = nn.Parameter(torch.zeros(shape))
    local = torch.optim.SGD([("weight", weight)], lr=lr, momentum=momentum)
    return weight, RemoteOptimizer(local, session=session, **arguments)


def wrap_model(
    session: Session, model: nn.Module, *, lr: float = 0.1, momentum: float = 0.0, **arguments: Any
) -> RemoteOptimizer:
    """Return an optimizer, SGD, that trains a model."""
    local = torch.optim.SGD(model.named_parameters(), lr=lr, momentum=momentum)
    return RemoteOptimizer(local, model=model, session=session, **arguments)


def step_with(optimizer: Optimizer, *weights: nn.Parameter, value: float = 1.0) -> None:
    """Take a step whose gradients have this value in all elements."""
    for weight in weights:
        weight.grad = torch.full_like(weight, value)
    optimizer.step()


def seeded(model: T, seed: int = 3, bound: float = 0.2) -> T:
    """Give a model the same weights at each call, in any thread."""
    assert isinstance(model, nn.Module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return model


class Wait(torch.autograd.Function):
    """The identity, times 2; backward waits until the condition holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, condition: Callable[[], bool]) -> Tensor:
        ctx.condition = condition
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        assert wait_until(ctx.condition, 20), "no bucket has left while backward was running"
        return gradient * 2, None


# ---------------------------------------------------------------------- the oracle


def values(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the parameters."""
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    return {name: parameter.detach().clone() for name, parameter in named}


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        different = (actual[name] != tensor).sum().item()
        assert different == 0, f"{different} of {tensor.numel()} elements of {name!r} differ"


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=rtol, atol=atol)


def average(gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Average the trainers' gradients of each parameter; one that is missing on some trainers counts as zeros there."""
    means: list[Tensor | None] = []
    for parts in zip(*gradients, strict=True):
        present = [part for part in parts if part is not None]
        means.append(sum(present[1:], present[0]) * (1 / len(gradients)) if present else None)
    return [mean.coalesce() if mean is not None and mean.is_sparse else mean for mean in means]


def gradients_of(optimizer: Optimizer, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """Compute one trainer's gradients, in the order of the parameters of the groups."""
    optimizer.zero_grad()
    loss().backward()
    found = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return [each.coalesce() if each is not None and each.is_sparse else each for each in found]


def set_average(optimizer: Optimizer, losses: Iterable[Callable[[], Tensor]]) -> None:
    """Set the gradients of a round, to which each trainer contributes one of these losses."""
    means = average([gradients_of(optimizer, loss) for loss in losses])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean


# ---------------------------------------------------------------------- given gradients

STEPS = 10
LR = 0.01
# Odd sizes, a scalar, a matrix that is cut; small blocks make cuts at odd places. Torch uses several threads from
# 32768 elements on.
SHAPES = {"embed": (101, 37), "scale": (), "bias": (129,), "out": (10, 1000), "wide": (331, 401)}

# Name -> class and arguments; the fused ones are compared with fused=True, the others with foreach=False.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.99)}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.8}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.01}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"weight_decay": 0.01}),
}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
Parameters = dict[str, nn.Parameter]


def make_parameters(seed: int = 0) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def make_optimizer(name: str, parameters: Parameters, *, local: bool) -> Optimizer:
    """Make two groups with rates of their own; `local` picks the implementation that the pservers run."""
    cls, options = OPTIMIZERS[name]
    if local:
        options = {**options, "fused": True} if cls in FUSED else {**options, "foreach": False}
    items = list(parameters.items())
    groups: list[dict[str, Any]] = [{"params": items[:2]}, {"params": items[2:], "lr": 3 * LR}]
    return cls(groups, lr=LR, **options)


def set_gradients(parameters: Parameters, step: int, contributor: int = 0) -> None:
    """Set gradients that are a function of (step, contributor); one parameter has none in some steps."""
    generator = torch.Generator().manual_seed(1000 * step + contributor)
    for name, parameter in parameters.items():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if name == "bias" and step % 4 == 1:
            parameter.grad = None


def change_rates(optimizer: Optimizer, step: int) -> None:
    """Change the learning rates as a scheduler does, in every step."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9 if step % 2 else 1.05


def train_locally(name: str) -> dict[str, Tensor]:
    """Train in one process what `train_remotely` trains."""
    parameters = make_parameters()
    optimizer = make_optimizer(name, parameters, local=True)
    for step in range(STEPS):
        set_gradients(parameters, step)
        optimizer.step()
        change_rates(optimizer, step)
    return values(parameters)


def train_remotely(name: str, session: Session, before_step: Callable[[int], None]) -> dict[str, Tensor]:
    """Train as one trainer of a cluster; it starts from other values, which the first pull replaces."""
    parameters = make_parameters(seed=session.rank)
    optimizer = RemoteOptimizer(make_optimizer(name, parameters, local=False), session=session)
    for step in range(STEPS):
        set_gradients(parameters, step)
        before_step(step)
        optimizer.step()
        change_rates(optimizer, step)
    optimizer.synchronize()
    return values(parameters)


# ---------------------------------------------------------------------- a model with special parameters

NET_STEPS = 8
WORDS, WIDTH = 50, 24


class Net(nn.Module):
    """Parameters that are tied, frozen, never used, and used in some steps."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.never = nn.Parameter(torch.ones(40))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight
        seeded(self, seed, 0.3)

    def forward(self, words: Tensor, step: int) -> Tensor:
        hidden = torch.tanh(self.hidden(self.words(words)))
        if step % 3 == 1:
            hidden = hidden + self.sometimes(hidden)
        found: Tensor = self.out(torch.relu(self.frozen(hidden)))
        return found


def net_loss(model: Net, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, WORDS, (16,), generator=generator)
    return nn.functional.cross_entropy(model(words, step), (words + 1) % WORDS)


def train_net_locally() -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for step in range(NET_STEPS):
        set_average(optimizer, [partial(net_loss, model, step, rank) for rank in range(2)])
        optimizer.step()
    return values(model)


def wrap_net(session: Session, model: nn.Module, **arguments: Any) -> RemoteOptimizer:
    return RemoteOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model=model, session=session, **arguments)


def train_net(
    session: Session,
    *,
    after_step: Callable[[RemoteOptimizer], object] = lambda optimizer: None,
    **arguments: Any,
) -> dict[str, Tensor]:
    model = Net(seed=session.rank)
    optimizer = wrap_net(session, model, **arguments)
    for step in range(NET_STEPS):
        optimizer.zero_grad()
        net_loss(model, step, session.rank).backward()
        optimizer.step()
        after_step(optimizer)
    optimizer.synchronize()
    return values(model)


# ---------------------------------------------------------------------- training_script.py


class Oracle:
    """The training of a script in this process. `hosts` are the ranks of each trainer; some rounds are skipped."""

    def __init__(self, hosts: Sequence[Sequence[int]] = ((0,), (1,)), *, skipped: Collection[int] = ()) -> None:
        self.rates: dict[int, float | None] = {}  # by the round from which it counts; None: the script's own
        self.frozen: dict[int, set[str]] = {}
        self.model = training_script.make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True)
        self.rounds = [values(self.model)]  # the parameters after each
        self._hosts = hosts
        self._skipped = skipped
        self._stuck: set[str] = set()

    def after(self, round_: int) -> dict[str, Tensor]:
        while len(self.rounds) <= round_:
            self._take_round(len(self.rounds))
            self.rounds.append(values(self.model))
        return self.rounds[round_]

    def _take_round(self, round_: int) -> None:
        def gradients(rank: int) -> list[Tensor | None]:
            return gradients_of(self.optimizer, lambda: training_script.loss_of(self.model, rank, round_))

        means = average([average([gradients(rank) for rank in ranks]) for ranks in self._hosts])
        self._stuck = self.frozen.get(round_, self._stuck)
        if round_ in self.rates:
            rate = self.rates[round_]
            self.optimizer.param_groups[0]["lr"] = 0.01 if rate is None else rate
        for (name, parameter), mean in zip(self.model.named_parameters(), means, strict=True):
            parameter.grad = None if name in self._stuck else mean
        if round_ not in self._skipped:
            self.optimizer.step()

    def result(self, rounds: int) -> str:
        """Return what a script prints as its result."""
        self.after(rounds)
        return f"{digest_of(self.model)} {rounds}"


def expected_result(rounds: int, trainers: int = 2, *, skipped: Collection[int] = ()) -> str:
    return Oracle([(rank,) for rank in range(trainers)], skipped=skipped).result(rounds)
