"""A trainer whose gradients are a function of its rank and the round, so that a result does not depend on faults.

    python training_script.py ROUNDS [PAUSE_SECONDS [TROUBLE [KIND]]]

TROUBLE is RANK:ROUND:WHAT, where WHAT is `nan` (in that gradient), `raise` (after that round), `raise-once`, `stop`
or `hang`.
KIND is a name in `KINDS`. Prints `round N` for each round and in the end `result RESULT ROUND`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from gradpost import RemoteOptimizer, Session, connect

SIZES = (40, 100, 7)  # of the rows that `Counting` counts in: several blocks, on every pserver


def say(text: str) -> None:
    sys.stdout.write(text + "\n")  # in one piece: the processes of a host write to the same pipe
    sys.stdout.flush()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))


def loss_of(model: nn.Module, rank: int, round_: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return model(torch.randn(8, 20, generator=generator)).pow(2).mean()


def make_tables() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(500, 8, mode="sum", sparse=True), nn.Linear(8, 3))


def loss_of_tables(model: nn.Module, rank: int, begun: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * begun + rank)
    return model(torch.randint(500, (8, 3), generator=generator)).pow(2).mean()


def digest_of(model: nn.Module) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


class Regression:
    """Adam on a small network."""

    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam

    def __init__(self, session: Session) -> None:
        self.session = session
        self.model = make_model()
        self.optimizer = RemoteOptimizer(
            self.optimizer_class(self.model.named_parameters(), lr=0.01), model=self.model, session=session
        )

    @property
    def begun(self) -> int:
        return self.optimizer.round

    def take_step(self, *, has_nan: bool) -> None:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.session.rank, self.begun + 1)
        loss.backward()
        self.session.report(loss=loss.item())
        if has_nan:
            next(self.model.parameters()).grad[0, 0] = float("nan")
        self.optimizer.step()

    def result(self) -> str:
        return digest_of(self.model)


class Decaying(Regression):
    """AdamW on the same network."""

    optimizer_class = torch.optim.AdamW


class Counting(Regression):
    """Each contribution adds 1 to its trainer's row of every parameter: the result is how often each was applied.

    The result has the count of every trainer; `6/7` if its elements do not agree.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tensors = [nn.Parameter(torch.zeros(session.world_size, size)) for size in SIZES]
        named = [(f"p{i}", tensor) for i, tensor in enumerate(self.tensors)]
        self.optimizer = RemoteOptimizer(torch.optim.SGD(named, lr=1.0), session=session)

    def take_step(self, *, has_nan: bool) -> None:
        for tensor in self.tensors:
            tensor.grad = torch.zeros_like(tensor)
            tensor.grad[self.session.rank] = -1.0
        self.optimizer.step()

    def result(self) -> str:
        self.optimizer.synchronize()
        rows = [{x for tensor in self.tensors for x in tensor[rank].tolist()} for rank in range(len(self.tensors[0]))]
        return ",".join("/".join(f"{value:.0f}" for value in sorted(row)) for row in rows)


class Tables(Regression):
    """Adagrad on a sparse table and a layer behind it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.model = make_tables()
        wrapped = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.optimizer = RemoteOptimizer(wrapped, model=self.model, session=session)

    def take_step(self, *, has_nan: bool) -> None:
        self.optimizer.zero_grad()
        loss_of_tables(self.model, self.session.rank, self.begun).backward()
        self.optimizer.step()


KINDS = {"regression": Regression, "decaying": Decaying, "counting": Counting, "tables": Tables}


def train(session: Session, rounds: int, pause: float, trouble: str, kind: str) -> None:
    training = KINDS[kind](session)
    optimizer = training.optimizer
    rank, at, what = trouble.split(":") if trouble else ("", "0", "")
    is_troubled = rank == str(session.rank)
    say(f"begin {optimizer.round}")
    while training.begun < rounds:
        training.take_step(has_nan=is_troubled and what == "nan" and training.begun + 1 == int(at))
        if training.begun == rounds:
            optimizer.synchronize()  # the run may go back as long as something is on its way
        say(f"round {optimizer.round}")
        if is_troubled and optimizer.round == int(at):
            if what == "stop":
                break
            if what == "hang":
                time.sleep(600)
            if what == "raise-once" and not Path("raised").exists():
                Path("raised").touch()
                what = "raise"
            if what == "raise":
                raise ValueError("no data")
        time.sleep(pause)  # stands for computation
    say(f"result {training.result()} {optimizer.round}")


def main() -> None:
    given = sys.argv[1:]
    rounds, pause, trouble, kind = (*given, *("", "0", "", "regression")[len(given) :])
    torch.set_num_threads(1)
    session = connect()
    if session.host is not None:
        say(f"process {session.rank} {os.getpid()}")
    try:
        train(session, int(rounds), float(pause), trouble, kind)
    except Exception as error:
        say(f"ended {session.rank} {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
