"""Strategy ring when a trainer dies, hangs or is done: the others get an error that names it, or go on."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, Signals

import pytest

from trainer_client.testing import LocalCluster

from .trainer_processes import Plot, Trainer
from .up_support import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.ring]
LEASE = 1.0
LONG_LEASE = 20.0
ROUND_TIMEOUT = 2.0
SLACK = 2.5  # heartbeats, the coordinator's tick, the processors' other work


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    lease: float = getattr(request, "param", LEASE)
    with LocalCluster(
        pservers=0, trainers=3, strategy="ring", lease_seconds=lease, round_timeout_seconds=ROUND_TIMEOUT
    ) as cluster:
        yield cluster


@pytest.fixture
def trainers(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[list[Trainer]]:
    plots: dict[int, Plot] = getattr(request, "param", {})
    trainers = [Trainer(cluster.address, rank, plots.get(rank, Plot())) for rank in range(3)]
    yield trainers
    for trainer in trainers:
        trainer.end()


@pytest.mark.parametrize("number", [SIGKILL, SIGSTOP], ids=lambda number: number.name)
def test_who_dies_or_is_stopped_is_named(trainers: list[Trainer], number: Signals) -> None:
    for trainer in trainers:
        trainer.wait_for("round", 5)
    at = trainers[1].signal(number)
    for trainer in (trainers[0], trainers[2]):
        end = trainer.wait_for_end()
        assert (end.what, end.facts["ranks"]) == ("trainer_lost", [1])
        assert "trainer 1 was lost: no heartbeat" in end.text
        assert end.at - at < LEASE + SLACK


@pytest.mark.parametrize("trainers", [{2: Plot(hangs_after=4)}], indirect=True, ids=["in round 5"])
def test_who_hangs_is_named(trainers: list[Trainer]) -> None:
    at = trainers[2].wait_for("hanging").at
    for trainer in trainers[:2]:
        end = trainer.wait_for_end()
        assert (end.what, end.facts["missing"]) == ("round_timeout", [2])
        assert "trainer 2 did not bring gradients into the ring for round 5" in end.text
        assert end.at - at < ROUND_TIMEOUT + SLACK


UNEVEN = {0: Plot(steps=4), 1: Plot(steps=9), 2: Plot(steps=14, hangs_after=14)}


@pytest.mark.parametrize("trainers", [UNEVEN], indirect=True, ids=["4, 9 and 14 batches"])
def test_who_has_fewer_batches_accompanies_the_others(cluster: LocalCluster, trainers: list[Trainer]) -> None:
    trainers[2].wait_for("hanging")
    with pytest.raises(AssertionError, match="waits for ever"):
        trainers[0].wait_for_end(ROUND_TIMEOUT + LEASE)
    assert cluster.status().state == "training"
    trainers[2].wake()
    assert [trainer.wait_for_end().what for trainer in trainers] == ["done"] * 3
    assert [max(e.round for e in t.events if e.what == "round") for t in trainers] == [4, 9, 14]
    status = cluster.status()
    assert (status.state, status.round) == ("finished", 14)


@pytest.mark.parametrize("trainers", [{0: Plot(steps=4)}], indirect=True, ids=["trainer 0 is done"])
@pytest.mark.parametrize("dies", [0, 2])
def test_a_death_ends_the_run_of_those_who_have_batches(
    cluster: LocalCluster, trainers: list[Trainer], dies: int
) -> None:
    trainers[1].wait_for("round", 8)
    at = trainers[dies].signal(SIGKILL)
    for trainer in (t for t in trainers if t.rank != dies):
        end = trainer.wait_for_end()
        assert end.at - at < LEASE + SLACK
        assert end.what == ("done" if trainer.rank == 0 else "trainer_lost")  # it is nothing to one that is done
    assert cluster.status().state == "failed"


UNEQUAL = "(4 if session.rank == 0 else 1_000_000)"
SCRIPT = """
import sys, torch
from trainer_client import RemoteOptimizer, connect
session = connect()
{begin}
weight = torch.nn.Parameter(torch.zeros(100_000))
optimizer = RemoteOptimizer(torch.optim.SGD([weight], lr=1.0), overlap=True)
while optimizer.round < {rounds}:
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    print("round", optimizer.round, flush=True)
    {in_each_round}
print("value", weight[0].item())
{end}
"""


def write_script(folder: Path, *, rounds: int | str, in_each_round: str = "", **replaced: str) -> list[str]:
    """Write a training script; `begin` and `end` stand for lines at these places."""
    script = folder / "script.py"
    text = {"begin": "", "end": "", **replaced}
    script.write_text(SCRIPT.format(rounds=rounds, in_each_round=in_each_round, **text))
    return [sys.executable, "-W", "error", str(script)]


def is_waiting(cluster: LocalCluster, rank: int, round_: int) -> bool:
    found = [trainer for trainer in cluster.status().trainers if trainer.rank == rank]
    return any(trainer.round == round_ and trainer.waiting_seconds > 0 for trainer in found)


def wait_for_line(cluster: LocalCluster, text: str) -> None:
    deadline = time.monotonic() + 60
    while not any(text in line for line in cluster.output):
        assert time.monotonic() < deadline, cluster.output
        time.sleep(0.05)


@pytest.mark.extended
def test_the_processes_of_the_others_end_too(cluster: LocalCluster, tmp_path: Path) -> None:
    command = write_script(tmp_path, rounds=1_000_000)
    children = [cluster.start_trainer(rank, command) for rank in range(3)]
    wait_for_line(cluster, "] round 20")
    children[2].signal(SIGSTOP)
    assert [child.wait(15) for child in children[:2]] == [1, 1]
    for rank in range(2):
        assert any(line.startswith(f"[trainer {rank}] ps_protocol.errors.TrainerLost") for line in cluster.output)
    assert not [line for line in cluster.output if "leaving the run failed" in line]


@pytest.mark.extended
def test_a_trainer_that_leaves_the_others_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    """As no trainer of this version does."""
    script = write_script(tmp_path, rounds=UNEQUAL, end="session._join_ring = None")
    assert cluster.run_trainers(script, timeout=60) == [0, 1, 1], cluster.output
    said = "ps_protocol.errors.Ended: trainer 0 left before round 5"
    for rank in (1, 2):
        assert any(line.startswith(f"[trainer {rank}] {said}") for line in cluster.output)


@pytest.mark.extended
@pytest.mark.parametrize("cluster", [LONG_LEASE], indirect=True, ids=["long lease"])
def test_an_interrupt_of_who_is_done_is_heard_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    command = write_script(tmp_path, rounds=UNEQUAL)
    children = [cluster.start_trainer(rank, command) for rank in range(3)]
    wait_for_line(cluster, "no batches are left here")
    wait_for_line(cluster, "[trainer 1] round 30")
    children[0].signal(SIGINT)
    assert [child.wait(LONG_LEASE / 2) for child in children[1:]] == [1, 1]  # it is not its lease that ends
    said = "ps_protocol.errors.TrainerLost: trainer 0 failed: KeyboardInterrupt"
    for rank in (1, 2):
        assert any(line.startswith(f"[trainer {rank}] {said}") for line in cluster.output), cluster.output


@pytest.mark.extended
@pytest.mark.parametrize("how", ["interrupted", "its optimizer"])
@pytest.mark.parametrize("elements", [100_000, 18], ids=["large", "as large as what is said of a round"])
def test_who_catches_what_ends_a_round_has_left_it(
    cluster: LocalCluster, tmp_path: Path, how: str, elements: int
) -> None:
    """Collectives of another round must not meet those of this one."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import threading
        import torch
        from trainer_client import RemoteOptimizer, connect

        session = connect()
        weight = torch.nn.Parameter(torch.zeros({elements}))
        late = threading.Event()

        class Failing(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                if {how == "its optimizer"} and session.rank == 0 and optimizer.round == 6:
                    raise ValueError("of the script")

        optimizer = RemoteOptimizer(Failing([weight], lr=1.0))
        try:
            while optimizer.round < 30:
                optimizer.zero_grad()
                weight.sum().backward()
                if {how == "interrupted"} and session.rank == 1 and optimizer.round == 6:
                    late.wait({ROUND_TIMEOUT} - 0.1)
                optimizer.step()
                assert weight.unique().numel() == 1
        except (ValueError, KeyboardInterrupt) as error:
            print("caught", type(error).__name__, flush=True)
    """)
    )
    children = [cluster.start_trainer(rank, [sys.executable, str(script)]) for rank in range(3)]
    if how == "interrupted":
        assert wait_until(lambda: is_waiting(cluster, rank=0, round_=6), 30)
        children[0].signal(SIGINT)
    assert [child.wait(30) for child in children] == [0, 1, 1], "\n".join(cluster.output)
    said = "ps_protocol.errors.TrainerLost: trainer 0 failed: it left in the middle of round 7"
    for rank in (1, 2):
        assert f"[trainer {rank}] {said}" in cluster.output


@pytest.mark.extended
def test_a_trainer_that_is_done_waits_for_longer_than_the_others(cluster: LocalCluster, tmp_path: Path) -> None:
    """A trainer's own limit, of 5 s here, is two round time-outs and a lease."""
    command = write_script(
        tmp_path,
        rounds="(4 if session.rank == 0 else 9)",
        begin="import time; from trainer_client.engines import ring_group; ring_group.SPARE_SECONDS = 0.0",
        in_each_round="if session.rank == 2 and optimizer.round == 9: time.sleep(8)  # it scores its model",
    )
    assert cluster.run_trainers(command, timeout=60) == [0, 0, 0], cluster.output
    assert not [line for line in cluster.output if "does not take part any more" in line]
    assert cluster.status().state == "finished"


@pytest.mark.extended
def test_a_script_that_fails_is_named_with_its_reason(cluster: LocalCluster, tmp_path: Path) -> None:
    command = write_script(
        tmp_path, rounds=9, in_each_round="if optimizer.round == 3 and session.rank == 1: raise ValueError('no data')"
    )
    assert cluster.run_trainers(command, timeout=60) == [1, 1, 1], "\n".join(cluster.output)
    for rank in (0, 2):
        said = f"[trainer {rank}] ps_protocol.errors.TrainerLost: trainer 1 failed: ValueError: no data"
        assert said in cluster.output


@pytest.mark.extended
def test_the_scripts_own_process_group_is_used_if_it_fits(cluster: LocalCluster, tmp_path: Path) -> None:
    begin = f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=session.rank, world_size=3)"
    command = write_script(
        tmp_path,
        rounds="3 + 2 * session.rank",
        begin=f"import torch.distributed as dist; {begin}",
        # Collectives of the script come in between, and after those of the session, which ends beside the others.
        end="""
group = optimizer._engine._group.collectives._group
assert group in dist.distributed_c10d._world.pg_map and group is not dist.group.WORLD
session.close()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 3
dist.destroy_process_group()
""",
    )
    assert cluster.run_trainers(command, timeout=60) == [0, 0, 0], cluster.output
    for rank in range(3):
        assert any(line.startswith(f"[trainer {rank}] value {-3.0 - 2 * rank}") for line in cluster.output)


@pytest.mark.extended
def test_a_process_group_of_one_trainer_alone_is_left_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    begin = f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)"
    begin = f"import torch.distributed as dist\nif session.rank == 0: {begin}"
    command = write_script(tmp_path, rounds=3, begin=begin)
    assert cluster.run_trainers(command, timeout=60) == [0, 0, 0], cluster.output
