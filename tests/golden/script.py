"""One process of golden runs: `python -m tests.golden.script FOLDER CLUSTER RUN…` trains them one after the other.

It prints a line of JSON for each run, with the digests of parameters and float buffers, and on rank 0 those of the
optimizer state. Gradients come from integers, powers of two and elementwise operations alone, so that every CPU
computes the same ones. Those of batch norm come from torch's default kernels, in one thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, SparseAdam

from gradpost import RemoteOptimizer, Session, connect
from tests.cluster.training import change_rates, make_optimizer
from tests.golden.runs import CHANGES, OVERFLOW_STEP, SETUPS, STEPS, Run, Setup
from trainer_client.client.pserver_client import PserverClient
from trainer_client.engines.script_optimizers import CombinedOptimizer

SHAPES = {"matrix": (61, 67), "vector": (129,), "scalar": (), "last": (3, 400)}
NORM_SHAPE = (8, 130)  # of a batch
TABLE_SHAPE, NUM_LOOKUPS = (301, 12), 40
PATIENCE_SECONDS = 60.0


class Layer(nn.Module):
    """A layer whose gradient is the data plus half of the weight's newest snapshot."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)
        self.snapshot = torch.empty(0)

    def forward(self, data: Tensor, takes_snapshot: bool) -> Tensor:
        if takes_snapshot:
            self.snapshot = self.weight.detach().clone()
        return (self.weight * (self.snapshot * 0.5 + data)).sum()


class Table(nn.Embedding):
    """A table whose gradient is that of a layer, in the rows that the data look up."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(*values.shape, sparse=True, _weight=values)
        self.snapshot = torch.empty(0)

    def forward(self, data: Tensor, takes_snapshot: bool) -> Tensor:
        if takes_snapshot:
            self.snapshot = self.weight.detach().clone()
        rows = (data[:, 0].abs() * TABLE_SHAPE[0]).long() % TABLE_SHAPE[0]
        return (super().forward(rows) * (self.snapshot[rows] * 0.5 + data)).sum()


class Norm(nn.BatchNorm1d):
    """Batch norm whose output is multiplied by the data, since its sum alone has no gradient."""

    def forward(self, data: Tensor, _: bool) -> Tensor:
        return (super().forward(data) * data).sum()


def draw(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw multiples of 2**-12 from -1 to 1."""
    return (torch.randint(-4096, 4097, shape, generator=generator) * 2.0**-12).to(dtype)


def make_model(seed: int, dtype: torch.dtype, run: Run) -> nn.ModuleDict:
    generator = torch.Generator().manual_seed(seed)
    model = nn.ModuleDict({name: Layer(draw(shape, generator, dtype)) for name, shape in SHAPES.items()})
    if run.has_batch_norm:
        model["norm"] = Norm(NORM_SHAPE[1], dtype=dtype)
    if run.has_table:
        model["table"] = Table(draw(TABLE_SHAPE, generator, dtype))
    return model


def loss_of(model: nn.ModuleDict, step: int, rank: int, dtype: torch.dtype, takes_snapshot: bool) -> Tensor:
    """Leave the vector out in some steps, and the scalar and batch norm of trainer 1 in others.

    These parameters have no gradient then, and these buffers do not change. Trainer 1 looks up no row in others.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shapes = {**SHAPES, "norm": NORM_SHAPE, "table": (NUM_LOOKUPS, TABLE_SHAPE[1])}
    data = {name: draw(shapes[name], generator, dtype) for name in model}
    if step % 4 == 1:
        del data["vector"]
    if step % 4 == 2 and rank == 1:
        del data["scalar"]
        data.pop("norm", None)
    if step % 4 == 3 and rank == 1 and "table" in data:
        data["table"] = data["table"][:0]
    return torch.stack([model[name](values, takes_snapshot) for name, values in data.items()]).sum()


class Turns:
    """The right to go on, which is a byte in the pipe of a trainer."""

    def __init__(self, folder: Path, trainers: int) -> None:
        self._pipes = [os.open(folder / f"turn-{rank}", os.O_RDWR) for rank in range(trainers)]

    def wait(self, rank: int) -> None:
        if not select.select([self._pipes[rank]], [], [], PATIENCE_SECONDS)[0]:
            raise TimeoutError(f"trainer {rank} had no turn for {PATIENCE_SECONDS:g} s")
        os.read(self._pipes[rank], 1)

    def pass_to(self, *ranks: int) -> None:
        for rank in ranks:
            os.write(self._pipes[rank], b".")


def train(setup: Setup, run: Run, session: Session, turns: Turns) -> dict[str, Any]:
    """Train one run; returns the digests."""
    rank, dtype = session.rank, getattr(torch, run.parameter_dtype)
    model = make_model(rank, dtype, run)  # the lowest rank's values count
    parameters = dict(model.named_parameters())
    local: Optimizer
    if run.optimizer == "SparseAdam":
        sparse = SparseAdam([parameters.pop("table.weight")], lr=0.01)
        local = CombinedOptimizer({"dense": Adam(parameters.values()), "sparse": sparse})
    else:
        local = make_optimizer(run.optimizer, parameters, local=False)
    outer = make_optimizer(run.outer, parameters, local=False) if run.outer else None
    if run.outer_sgd:
        outer = torch.optim.SGD(model.parameters(), **run.outer_sgd)
    optimizer = RemoteOptimizer(local, model=model, outer=outer)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if run.has_scaler else None
    if setup.takes_turns and rank == 0:  # it has pulled the initial values, which another trainer's step would replace
        turns.pass_to(setup.trainers - 1)
    start = step = optimizer.round  # above 0 in a run that was resumed
    for earlier in range(start if run.fault not in CHANGES else 0):
        change_rates(optimizer, earlier)
    waited_at = set()
    while step < (run.steps[rank] if run.steps else STEPS):
        # With max_delay a matter of time decides which version the parameters have in between.
        takes_snapshot = step % (setup.max_delay + 1) == 0
        if takes_snapshot:
            optimizer.synchronize()
        if run.waits(rank, step) and step not in waited_at:
            waited_at.add(step)
            print("waiting", flush=True)
            turns.wait(rank)
            if run.fault == "kill a trainer between two pservers" and start == 0:
                die_between_pservers()
        if setup.takes_turns and step % 2 == 0:
            turns.wait(rank)
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, dtype, takes_snapshot)
        if scaler is None:
            with optimizer.accumulate():
                for part in range(1, run.num_passes):
                    (loss_of(model, step, rank, dtype, takes_snapshot) * 0.5**part).backward()
            loss.backward()
            optimizer.step()
        else:
            factor = 2.0**120 if (step, rank) == (OVERFLOW_STEP, 1) else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        if run.fault not in CHANGES:  # the rates would depend on how many steps are lost in a rollback
            change_rates(optimizer, step)
        if setup.takes_turns and step % 2 == 1:
            turns.pass_to((rank - 1) % setup.trainers)
        step = optimizer.round if run.fault in CHANGES else step + 1
    optimizer.synchronize()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    parameters = {name: digest([tensor]) for name, tensor in tensors.items()}
    state = digest_state(optimizer) if rank == 0 else None
    return {"rank": rank, "start": start, "parameters": parameters, "optimizer_state": state}


def die_between_pservers() -> None:
    """Let this process die in its next step, once pserver 0 has applied the round and no other has its contribution."""
    get = PserverClient.get

    async def get_and_die(self: PserverClient, *arguments: Any) -> None:
        if self.index == 0:
            await get(self, *arguments)
            os._exit(1)
        await asyncio.Event().wait()

    PserverClient.get = get_and_die  # type: ignore[method-assign, assignment]


def digest_state(optimizer: RemoteOptimizer) -> dict[str, str]:
    """Return a digest of each slot, and of the step counts, over all parameters."""
    state = optimizer.state_dict()["state"]
    names = sorted({name for slots in state.values() for name in slots})
    return {name: digest(state[i][name] for i in sorted(state) if name in state[i]) for name in names}


def digest(values: Iterable[Any]) -> str:
    hashed = xxhash.xxh3_64()
    for value in values:
        tensor = torch.as_tensor(value).contiguous()
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def main(folder: str, cluster: str, *names: str) -> None:
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT", "see tests.golden.clusters.same_arithmetic"
    torch.set_num_threads(1)
    setup = SETUPS[cluster]
    turns = Turns(Path(folder), setup.trainers)
    for name in names:
        run = setup.runs[name]
        with connect(**run.settings) as session:
            print(json.dumps({"run": name, **train(setup, run, session, turns)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
