"""The trainer of a history. Its gradients encode rank and round, so that every version can be decoded.

    python trainer.py FOLDER LIFE

Each parameter has a row for every pserver, and a row is a block: a count for each rank, and a sum of rounds for each
rank. With SGD and a rate of 1 a contribution to round 7 adds 12 to the first and 84 to the second, divided by the
number of members: whole numbers, which float32 adds exactly for 1 to 4 members. Where a parameter is sparse, each
element of these is a row of its own, which only one rank touches, and further rows stay zero.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from gradpost import RemoteOptimizer, connect
from ps_protocol.errors import GradpostError, NonFiniteGradient
from tests.chaos.diary import Diary
from tests.chaos.setup import FREEZABLE, NUM_ROWS, PARAMETERS, SPARSE, UNIT, Setup
from tests.chaos.tricks import Tricks

COMPUTE_SECONDS = 0.02
NEVER_REACHED = 1e9


class ChaosTrainer:
    """One incarnation of one rank."""

    def __init__(self, folder: Path, life: int) -> None:
        self.setup = Setup(**json.loads((folder / "setup.json").read_text()))
        shape = (self.setup.num_pservers, 2, self.setup.num_trainers)
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name in (*PARAMETERS, FREEZABLE)}
        if self.setup.is_sparse:
            self.parameters[SPARSE] = torch.nn.Parameter(torch.zeros(self.setup.num_pservers * NUM_ROWS))
        self.local = torch.optim.SGD(list(self.parameters.items()), lr=1.0)
        self.session = connect()  # last, as the other trainers wait for this one from now on
        self.rank = self.session.rank
        self.diary = Diary(folder / f"trainer-{self.rank}-{life}.jsonl", rank=self.rank, life=life)
        orders = folder / f"orders-{self.rank}"  # the campaign appends to it
        orders.touch()
        self.orders = orders.open("rb")
        self.orders.seek(0, os.SEEK_END)
        self.is_nan_ordered = False
        self.hurries_until = 0.0
        chance = random.Random(f"{self.setup.seed} {self.rank} {life}")
        self.tricks = Tricks(self.diary, chance)
        self.tricks.play()
        self._stop = folder / "stop"

    def train(self) -> None:
        """Take steps until the last round of this trainer."""
        model = Model(self.parameters) if self.setup.is_sparse else None
        most = NEVER_REACHED if self.setup.clips else None
        self.optimizer = RemoteOptimizer(self.local, model=model, max_grad_norm=most)
        self.steps = self.optimizer._engine.progress
        self.write_seen("start")
        while True:
            self.obey()
            attempt = self.attempt
            if self.steps.begun < self.last_step():
                self.step()
            elif self.steps.begun > self.steps.version:
                self.optimizer.synchronize()
            else:
                break
            self.write_seen("end" if self.attempt == attempt else "back")
        self.diary.write("done", round=self.steps.version, attempt=self.attempt)

    @property
    def attempt(self) -> int:
        """The attempt of the run that this trainer knows."""
        return self.session.client.coordinator.news.attempt.number

    def last_step(self) -> float:
        stops = json.loads(self._stop.read_text()) if self._stop.exists() else {}
        return float(stops.get(str(self.rank), "inf"))

    def obey(self) -> None:
        for order in map(json.loads, self.orders):
            if order["do"] == "hang":
                time.sleep(order["seconds"])  # heartbeats have a thread of their own
            elif order["do"] == "hurry":
                self.hurries_until = time.monotonic() + order["seconds"]
            elif order["do"] == "nan":
                self.is_nan_ordered = True
            else:
                self.tricks.ordered[order["do"]] += order["times"]

    def step(self) -> None:
        step = self.steps.begun + 1
        with_nan, self.is_nan_ordered = self.is_nan_ordered, False
        gradient = torch.zeros_like(self.parameters[PARAMETERS[0]])
        gradient[:, 0, self.rank] = -UNIT
        gradient[:, 1, self.rank] = -UNIT * step
        for name, parameter in self.parameters.items():
            is_sparse = self.setup.is_sparse and name == SPARSE
            parameter.grad = self.make_rows(step) if is_sparse else gradient.clone()
        if with_nan:
            gradient[0, 0, 0] = float("nan")  # on one pserver alone
            self.parameters[PARAMETERS[0]].grad = gradient
        if time.monotonic() > self.hurries_until:
            time.sleep(COMPUTE_SECONDS)
        self.diary.write("begin", round=step, attempt=self.attempt, nan=with_nan)
        try:
            self.optimizer.step()
        except NonFiniteGradient:
            if not with_nan:
                raise
            self.diary.write("refused", round=step, attempt=self.attempt)

    def make_rows(self, step: int) -> torch.Tensor:
        """Return the same gradient as rows."""
        own = torch.tensor([self.rank, self.setup.num_trainers + self.rank])
        rows = torch.cat([pserver * NUM_ROWS + own for pserver in range(self.setup.num_pservers)])
        values = torch.tensor([-UNIT, -UNIT * step], dtype=torch.float32).repeat(self.setup.num_pservers)
        return torch.sparse_coo_tensor(
            rows[None], values, self.parameters[SPARSE].shape, is_coalesced=True, check_invariants=False
        )

    def write_seen(self, what: str) -> None:
        """Record every block with its version."""
        landed, blocks = self.steps.version, {}
        for pserver, shard in enumerate(self.session.client.run.plan.shards):
            version = self.tricks.versions[pserver][landed]
            for block in (block for block in shard if block.parameter in PARAMETERS):
                values = self.parameters[block.parameter].detach().flatten()[block.begin : block.end].tolist()
                blocks[block.name] = [version, *values[: 2 * self.setup.num_trainers]]
        self.diary.write(what, round=landed, attempt=self.attempt, blocks=blocks)


class Model(torch.nn.Embedding):
    """The parameters, one of which is the weight of an embedding, under its own name."""

    sparse = True

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        torch.nn.Module.__init__(self)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    @property
    def weight(self) -> torch.nn.Parameter:  # type: ignore[override]
        return self.get_parameter(SPARSE)


def start_quickly() -> None:
    """Avoid the import of torch._dynamo, which takes the first optimizer two seconds of a processor."""
    for method in vars(torch.optim.Optimizer).values():
        if (wrapped := getattr(method, "__wrapped__", None)) is not None:
            wrapped.__dynamo_disable = wrapped


def main() -> None:
    torch.set_num_threads(1)
    start_quickly()
    if sabotage := os.environ.get("CHAOS_SABOTAGE"):
        from tests.chaos.sabotaged import SABOTAGES

        SABOTAGES[sabotage][0]()
    trainer = ChaosTrainer(Path(sys.argv[1]), int(sys.argv[2]))
    try:
        trainer.train()
    except GradpostError as error:
        trainer.diary.write("error", kind=getattr(error, "code", type(error).__name__), text=str(error))
        raise


if __name__ == "__main__":
    main()
