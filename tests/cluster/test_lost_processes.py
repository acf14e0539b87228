"""With policy `fail` and no log, and in a ring, the others get an error in time that names the lost process."""

from __future__ import annotations

import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP

import pytest

from ps_protocol.errors import TrainerLost, Unreachable
from trainer_client import Session, connect
from trainer_client.testing import LocalCluster

from .faulty_run import SCRIPT
from .trainer_processes import Plot, Trainer
from .training_script import train
from .up_support import ROOT, wait_until

pytestmark = pytest.mark.cluster

LEASE_SECONDS = 1.0
ROUND_TIMEOUT_SECONDS = 2.0
SLACK_SECONDS = 1.5  # heartbeats, the coordinator's tick, a request or two
Play = Callable[..., list[Trainer]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = {"on_trainer_loss": "fail", "durability": "none"}
    with LocalCluster(
        pservers=2,
        trainers=2,
        lease_seconds=LEASE_SECONDS,
        round_timeout_seconds=ROUND_TIMEOUT_SECONDS,
        local_transport=False,
        **settings,
    ) as cluster:
        wait_for_pservers(cluster)
        yield cluster


def wait_for_pservers(cluster: LocalCluster) -> None:
    assert wait_until(lambda: len(cluster.status().pservers) == 2, 60), cluster.output


@pytest.fixture
def play(cluster: LocalCluster) -> Iterator[Play]:
    """Start trainers; after the test the cluster must be able to serve an ordinary run."""
    trainers: list[Trainer] = []

    def play(*plots: Plot) -> list[Trainer]:
        trainers.extend(Trainer(cluster.address, rank, plot) for rank, plot in enumerate(plots))
        return trainers[-len(plots) :]

    def end() -> None:
        while trainers:
            trainers.pop().end()

    try:
        yield play
        end()
        for trainer in play(Plot(steps=3), Plot(steps=3)):
            assert trainer.wait_for_end().what == "done", trainer.events
    finally:
        end()


def test_a_trainer_that_is_killed_at_the_barrier(cluster: LocalCluster, play: Play) -> None:
    survivor, victim = play(Plot(), Plot(hangs_after=3))
    victim.wait_for("hanging")
    survivor.wait_for("round", 3)
    killed_at = victim.signal(signal.SIGKILL)
    error = survivor.wait_for_end()
    assert error.what == "trainer_lost", error
    assert "trainer 1 was lost: no heartbeat for" in error.text
    assert error.facts["ranks"] == [1]
    assert error.at - killed_at < LEASE_SECONDS + SLACK_SECONDS
    failure = cluster.status().failure
    assert failure is not None
    assert failure["detail"] in error.text


@pytest.mark.extended
def test_a_trainer_that_is_stopped_and_comes_back(cluster: LocalCluster, play: Play) -> None:
    victim, survivor = play(Plot(), Plot())
    survivor.wait_for("round", 3)
    stopped_at = victim.signal(signal.SIGSTOP)
    error = survivor.wait_for_end()
    assert error.what == "trainer_lost", error
    assert "trainer 0 was lost" in error.text
    assert error.at - stopped_at < LEASE_SECONDS + SLACK_SECONDS
    round_ = max(event.round for event in survivor.events)
    victim.signal(signal.SIGCONT)
    error = victim.wait_for_end()  # it is told that it is lost, and that its time is over
    assert error.what == "trainer_lost", error
    assert "trainer 0 was lost" in error.text
    assert [cluster.pserver_state(i).round for i in (0, 1)] in ([round_] * 2, [round_ + 1] * 2)


@pytest.mark.extended
def test_a_trainer_that_hangs_while_its_heartbeats_live(cluster: LocalCluster, play: Play) -> None:
    survivor, victim = play(Plot(), Plot(hangs_after=3))
    hung = victim.wait_for("hanging")
    error = survivor.wait_for_end()
    assert error.what == "round_timeout", error
    assert "trainer 1 did not reach the batch barrier of round 4 within the round time-out of 2 s" in error.text
    assert error.facts["missing"] == [1]
    assert ROUND_TIMEOUT_SECONDS - 0.5 < error.at - hung.at < ROUND_TIMEOUT_SECONDS + SLACK_SECONDS
    failure = cluster.status().failure
    assert failure is not None
    assert (failure["code"], failure["missing"]) == ("round_timeout", [1])  # not the one who gave up waiting
    victim.wake()
    error = victim.wait_for_end()
    assert error.what == "round_timeout", error
    assert "trainer 1 did not reach" in error.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.extended
def test_a_pserver_that_is_killed_or_stopped(cluster: LocalCluster, play: Play, number: signal.Signals) -> None:
    trainers = play(Plot(), Plot())
    for trainer in trainers:
        trainer.wait_for("round", 3)
    victim = cluster.pservers[-1]
    victim.signal(number)
    at = time.monotonic()
    for trainer in trainers:
        error = trainer.wait_for_end()
        assert error.what in ("pserver_lost", "unreachable"), error
        assert f"pserver {victim.name.split()[-1]}" in error.text
        assert error.at - at < LEASE_SECONDS + SLACK_SECONDS
    if number == signal.SIGKILL:
        victim.wait(10)
        cluster.start_pserver(int(victim.name.split()[-1]))
    else:
        victim.signal(signal.SIGCONT)
    wait_for_pservers(cluster)


@pytest.mark.extended
def test_a_script_that_raises_leaves_as_failed_with_its_reason(cluster: LocalCluster) -> None:
    command = [sys.executable, str(SCRIPT), "9", "0", "1:3:raise"]
    script = cluster.start_trainer(1, command, {"PYTHONPATH": str(ROOT)})
    said = pytest.raises(TrainerLost, match="trainer 1 failed: ValueError: no data")
    with Session(coordinator=cluster.address, rank=0, world_size=2) as session, said as error:
        train(session, rounds=9, pause=0, trouble="", kind="regression")
    assert error.value.facts["ranks"] == [1]
    assert script.wait(30) == 1
    assert any("ValueError: no data" in line for line in cluster.output)
    assert cluster.status().state == "failed"
    assert cluster.summary().line().startswith("failed: mode=sync")


def test_a_coordinator_that_was_never_started() -> None:
    with socket.socket() as silent:  # bound and not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(Unreachable, match=f"{address} did not answer for 0.5 s .*is it running"):
            connect(address, retry_seconds=0.5)
        assert 0.5 < time.monotonic() - begun < 0.5 + SLACK_SECONDS


# ---------------------------------------------------------------------- a ring

LONG_LEASE = 20.0
RING_SLACK_SECONDS = 2.5  # heartbeats, the coordinator's tick, the processors' other work


@pytest.fixture
def ring_cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    lease: float = getattr(request, "param", LEASE_SECONDS)
    with LocalCluster(
        pservers=0, trainers=3, strategy="ring", lease_seconds=lease, round_timeout_seconds=ROUND_TIMEOUT_SECONDS
    ) as ring_cluster:
        yield ring_cluster


@pytest.fixture
def trainers(ring_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[list[Trainer]]:
    plots: dict[int, Plot] = getattr(request, "param", {})
    trainers = [Trainer(ring_cluster.address, rank, plots.get(rank, Plot())) for rank in range(3)]
    yield trainers
    for trainer in trainers:
        trainer.end()


@pytest.mark.ring
def test_a_stopped_trainer_is_named(trainers: list[Trainer]) -> None:
    for trainer in trainers:
        trainer.wait_for("round", 5)
    at = trainers[1].signal(SIGSTOP)
    for trainer in (trainers[0], trainers[2]):
        end = trainer.wait_for_end()
        assert (end.what, end.facts["ranks"]) == ("trainer_lost", [1])
        assert "trainer 1 was lost: no heartbeat" in end.text
        assert end.at - at < LEASE_SECONDS + RING_SLACK_SECONDS


@pytest.mark.ring
@pytest.mark.parametrize("trainers", [{2: Plot(hangs_after=4)}], indirect=True, ids=["in round 5"])
def test_a_trainer_that_hangs_is_named(trainers: list[Trainer]) -> None:
    at = trainers[2].wait_for("hanging").at
    for trainer in trainers[:2]:
        end = trainer.wait_for_end()
        assert (end.what, end.facts["missing"]) == ("round_timeout", [2])
        assert "trainer 2 did not bring gradients into the ring for round 5" in end.text
        assert end.at - at < ROUND_TIMEOUT_SECONDS + RING_SLACK_SECONDS


@pytest.mark.ring
@pytest.mark.parametrize("trainers", [{0: Plot(steps=4)}], indirect=True, ids=["trainer 0 is done"])
@pytest.mark.parametrize("dies", [0, 2])
def test_a_death_ends_the_run_of_trainers_with_batches_left(
    ring_cluster: LocalCluster, trainers: list[Trainer], dies: int
) -> None:
    trainers[1].wait_for("round", 8)
    at = trainers[dies].signal(SIGKILL)
    for trainer in (t for t in trainers if t.rank != dies):
        end = trainer.wait_for_end()
        assert end.at - at < LEASE_SECONDS + RING_SLACK_SECONDS
        assert end.what == ("done" if trainer.rank == 0 else "trainer_lost")  # it is nothing to one that is done
    assert ring_cluster.status().state == "failed"


UNEQUAL = "(4 if session.rank == 0 else 1_000_000)"
RING_SCRIPT = """
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
    script.write_text(RING_SCRIPT.format(rounds=rounds, in_each_round=in_each_round, **text))
    return [sys.executable, "-W", "error", str(script)]


def is_waiting(ring_cluster: LocalCluster, rank: int, round_: int) -> bool:
    found = [trainer for trainer in ring_cluster.status().trainers if trainer.rank == rank]
    return any(trainer.round == round_ and trainer.waiting_seconds > 0 for trainer in found)


def wait_for_line(ring_cluster: LocalCluster, text: str) -> None:
    deadline = time.monotonic() + 60
    while not any(text in line for line in ring_cluster.output):
        assert time.monotonic() < deadline, ring_cluster.output
        time.sleep(0.05)


@pytest.mark.ring
@pytest.mark.extended
@pytest.mark.parametrize("ring_cluster", [LONG_LEASE], indirect=True, ids=["long lease"])
def test_an_interrupt_of_a_trainer_that_is_done_is_reported_at_once(ring_cluster: LocalCluster, tmp_path: Path) -> None:
    command = write_script(tmp_path, rounds=UNEQUAL)
    children = [ring_cluster.start_trainer(rank, command) for rank in range(3)]
    wait_for_line(ring_cluster, "no batches are left here")
    wait_for_line(ring_cluster, "[trainer 1] round 30")
    children[0].signal(SIGINT)
    assert [child.wait(LONG_LEASE / 2) for child in children[1:]] == [1, 1]  # it is not its lease that ends
    said = "ps_protocol.errors.TrainerLost: trainer 0 failed: KeyboardInterrupt"
    for rank in (1, 2):
        assert any(line.startswith(f"[trainer {rank}] {said}") for line in ring_cluster.output), ring_cluster.output


@pytest.mark.ring
@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "elements"), [("interrupted", 100_000), ("its optimizer", 18)], ids=["large", "as large as the tally"]
)
def test_a_trainer_that_catches_the_error_of_a_round_has_left_it(
    ring_cluster: LocalCluster, tmp_path: Path, how: str, elements: int
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
                    late.wait({ROUND_TIMEOUT_SECONDS} - 0.1)
                optimizer.step()
                assert weight.unique().numel() == 1
        except (ValueError, KeyboardInterrupt) as error:
            print("caught", type(error).__name__, flush=True)
    """)
    )
    children = [ring_cluster.start_trainer(rank, [sys.executable, str(script)]) for rank in range(3)]
    if how == "interrupted":
        assert wait_until(lambda: is_waiting(ring_cluster, rank=0, round_=6), 30)
        children[0].signal(SIGINT)
    assert [child.wait(30) for child in children] == [0, 1, 1], "\n".join(ring_cluster.output)
    said = "ps_protocol.errors.TrainerLost: trainer 0 failed: it left in the middle of round 7"
    for rank in (1, 2):
        assert f"[trainer {rank}] {said}" in ring_cluster.output


@pytest.mark.ring
@pytest.mark.extended
def test_a_trainer_that_is_done_waits_for_longer_than_the_others(ring_cluster: LocalCluster, tmp_path: Path) -> None:
    """A trainer's own limit, of 5 s here, is two round time-outs and a lease."""
    command = write_script(
        tmp_path,
        rounds="(4 if session.rank == 0 else 9)",
        begin="import time; from trainer_client.engines import ring_group; ring_group.SPARE_SECONDS = 0.0",
        in_each_round="if session.rank == 2 and optimizer.round == 9: time.sleep(8)  # it scores its model",
    )
    assert ring_cluster.run_trainers(command, timeout=60) == [0, 0, 0], ring_cluster.output
    assert not [line for line in ring_cluster.output if "does not take part any more" in line]
    assert ring_cluster.status().state == "finished"


@pytest.mark.ring
@pytest.mark.extended
def test_a_script_that_fails_is_named_with_its_reason(ring_cluster: LocalCluster, tmp_path: Path) -> None:
    command = write_script(
        tmp_path, rounds=9, in_each_round="if optimizer.round == 3 and session.rank == 1: raise ValueError('no data')"
    )
    assert ring_cluster.run_trainers(command, timeout=60) == [1, 1, 1], "\n".join(ring_cluster.output)
    for rank in (0, 2):
        said = f"[trainer {rank}] ps_protocol.errors.TrainerLost: trainer 1 failed: ValueError: no data"
        assert said in ring_cluster.output


@pytest.mark.ring
@pytest.mark.extended
def test_the_scripts_own_process_group_is_used_if_it_fits(ring_cluster: LocalCluster, tmp_path: Path) -> None:
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
    assert ring_cluster.run_trainers(command, timeout=60) == [0, 0, 0], ring_cluster.output
    for rank in range(3):
        assert any(line.startswith(f"[trainer {rank}] value {-3.0 - 2 * rank}") for line in ring_cluster.output)


@pytest.mark.ring
@pytest.mark.extended
def test_a_process_group_of_one_trainer_alone_is_left_alone(ring_cluster: LocalCluster, tmp_path: Path) -> None:
    begin = f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)"
    begin = f"import torch.distributed as dist\nif session.rank == 0: {begin}"
    command = write_script(tmp_path, rounds=3, begin=begin)
    assert ring_cluster.run_trainers(command, timeout=60) == [0, 0, 0], ring_cluster.output
