"""What users of other parameter servers complained about, and does not happen here: a tour.

Those who wait for ever are in test_nobody_waits.py, what is lost with a process in test_faults.py, and so on; here is
what is nobody else's.
"""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ps_protocol.frames import parse_frame
from trainer_client import RemoteOptimizer, Session
from trainer_client.pushing.buckets import Payload
from trainer_client.testing import LocalCluster

from ..soaking import parametrize_sampled
from .conftest import Carrier
from .parity_model import run_trainers
from .test_serve import environment, running
from .up_support import wait_until

pytestmark = pytest.mark.cluster

ROUNDING = 2e-5  # of weights below 1, after as many steps as there are here


@pytest.fixture
def lonely(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=1, trainers=1, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.fixture
def three(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=3, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


# ------------------------------------------------ "no working parameter server for PyTorch" (pytorch/examples#780)


def test_an_ordinary_script_trains_as_it_does_alone(three: LocalCluster) -> None:
    """A model, a DataLoader, a scheduler and real images: three trainers end where one process with all images does."""

    torch.manual_seed(0)
    begin = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def train(rank: int, world_size: int, wrap: Callable[[Any, nn.Module], Any]) -> dict[str, Tensor]:
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images[:900] / 16, dtype=torch.float32), torch.tensor(labels[:900]))
        sampler = DistributedSampler(data, world_size, rank, shuffle=False)
        loader = DataLoader(data, 90 // world_size, sampler=sampler)
        model = copy.deepcopy(begin)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True), model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                schedule.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def remotely(session: Session) -> dict[str, Tensor]:
        return train(
            session.rank,
            session.world_size,
            lambda optimizer, model: RemoteOptimizer(optimizer, model=model, session=session),
        )

    alone = train(0, 1, lambda optimizer, _: optimizer)
    for together in run_trainers(three.address, [remotely] * 3):
        for name, value in alone.items():
            torch.testing.assert_close(together[name], value, rtol=0, atol=ROUNDING)


# ----------------------- "trainers with different batch counts, or late starters, break a round" (Paddle#11710, #10153)


def test_other_numbers_of_batches_and_a_late_start_break_nothing(three: LocalCluster) -> None:
    """Trainer 2 comes when the others wait for it; 3, 5 and 9 batches: each round averages those who are left."""
    num_batches = [3, 5, 9]
    are_waiting = threading.Event()

    def train(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(10))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        for _ in range(num_batches[session.rank]):
            weight.grad = torch.full((10,), 2.0**session.rank)
            optimizer.step()
        return weight[0].item()

    ended: list[float] = [0.0] * 3

    def run(rank: int) -> None:
        if rank == 2:
            assert are_waiting.wait(60)
        with Session(coordinator=three.address, rank=rank, world_size=3) as session:
            ended[rank] = train(session)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: three.status().waiting_for == ("trainer 2",), seconds=60)
    are_waiting.set()
    for thread in threads:
        thread.join(60)
    together, pair, alone = 7 / 3, 6 / 2, 4.0
    assert ended == pytest.approx([-3 * together, -(3 * together + 2 * pair), -(3 * together + 2 * pair + 4 * alone)])
    assert three.summary().state == "finished"


# ------------------------------------------------------------------ "start order and role variables" (byteps#282)

SCRIPT = """
import torch
from trainer_client import RemoteOptimizer
optimizer = RemoteOptimizer(torch.optim.SGD(torch.nn.Linear(4, 2).named_parameters(), lr=0.1))
for _ in range(3):
    optimizer.step()
"""


@pytest.mark.extended
@parametrize_sampled(
    "order",
    [
        ["trainer", "trainer", "pserver", "pserver", "coordinator"],
        ["pserver", "trainer", "coordinator", "pserver", "trainer"],
        ["trainer", "coordinator", "trainer", "pserver", "pserver"],
    ],
    [["pserver", "trainer", "coordinator", "pserver", "trainer"]],
    ids=" ".join,
)
def test_processes_start_in_any_order_and_know_one_address(
    order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says who is which: ranks and indices are given out."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = {"GRADPOST_COORDINATOR": f"http://127.0.0.1:{port}"}
    services = {
        "coordinator": ("coordinator", "--port", port, "--num-pservers", "2", "--num-trainers", "2"),
        "pserver": ("pserver",),
    }
    trainers = []
    with ExitStack() as stack:
        for role in order:
            if role in services:
                stack.enter_context(running("serve", *services[role], "--exit-when-done", **env))
                continue
            trainer = subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment(**env))
            stack.callback(trainer.kill)
            trainers.append(trainer)
        assert [trainer.wait(90) for trainer in trainers] == [0, 0]


# ------------------------------------- "slower than one GPU, communication not overlapped" (apache/mxnet#6975)


@pytest.mark.overlap
def test_every_layer_but_the_first_is_pushed_while_backward_runs(lonely: LocalCluster) -> None:
    """Each layer's backward waits until the gradients of the layer behind it are at the pserver: all are hidden."""
    num_layers, names = 4, ["weight", "bias"]
    arrived = {f"{layer}.{name}": threading.Event() for layer in range(num_layers) for name in names}

    class Watched(nn.Linear):
        behind: list[str]

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            out.register_hook(self.wait)
            return out

        def wait(self, _: Tensor) -> None:
            for name in self.behind:
                assert arrived[name].wait(20), f"{name} has not left while backward was running"

    def work(session: Session) -> None:
        model = nn.Sequential(*(Watched(40, 40) for _ in range(num_layers)))
        for index, layer in enumerate(model):
            # The last bucket of a pserver says what there was, and leaves with step(): it has the first layer's bias.
            layer.behind = [f"{index + 1}.{name}" for name in names] if index + 1 < num_layers else []
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, session=session, overlap=True
        )
        parameter_of = {block.name: block.parameter for block in session.client.plan.blocks}
        push = session.client.push

        async def push_and_tell(round_: int, pserver: int, frame: Payload) -> bool:
            is_finite = await push(round_, pserver, frame)
            for tensor in parse_frame(b"".join(frame)).tensors:
                arrived[parameter_of[tensor.name]].set()
            return is_finite

        session.client.push = push_and_tell  # type: ignore[method-assign]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
            for event in arrived.values():
                event.clear()

    run_trainers(lonely.address, [work], bucket_bytes=100)
