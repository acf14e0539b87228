"""With policy `fail` and no log, and in a ring, the others get an error in time that names the lost process."""

from __future__ import annotations

import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from ps_protocol.errors import Unreachable
from trainer_client import connect
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .faulty_run import SCRIPT
from .trainer_processes import Plot, Trainer
from .up_support import ROOT, wait_until

pytestmark = pytest.mark.cluster

LEASE_SECONDS = 1.0
LONG_LEASE = 20.0
ROUND_TIMEOUT_SECONDS = 2.0
SLACK_SECONDS = 2.5  # heartbeats, the coordinator's tick, a request or two, the processors' other work
SETTINGS: dict[str, Any] = {
    "trainers": 3,
    "lease_seconds": LEASE_SECONDS,
    "round_timeout_seconds": ROUND_TIMEOUT_SECONDS,
}
FOREVER = Plot()
OF_PSERVERS = {"on_trainer_loss": "fail", "durability": "none"}
Play = Callable[..., list[Trainer]]
in_a_ring = pytest.param("ring", marks=pytest.mark.ring)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, shared_cluster: StartCluster) -> LocalCluster:
    """Return the cluster with the strategy of the test, which is "ps" if it has no such parameter."""
    params = getattr(request.node, "callspec", None)
    strategy = params.params.get("strategy", "ps") if params is not None else "ps"
    cluster = shared_cluster(**SETTINGS, strategy=strategy, **(OF_PSERVERS if strategy == "ps" else {}))
    wait_for_pservers(cluster)
    return cluster


def wait_for_pservers(cluster: LocalCluster) -> None:
    assert wait_until(lambda: len(cluster.status().pservers) == cluster.num_pservers, 60), cluster.output


@pytest.fixture
def play(cluster: LocalCluster) -> Iterator[Play]:
    """Start three trainers; after the test the cluster must be able to serve an ordinary run."""
    trainers: list[Trainer] = []

    def play(plots: dict[int, Plot] | None = None, usual: Plot = FOREVER) -> list[Trainer]:
        trainers.extend(Trainer(cluster.address, rank, (plots or {}).get(rank, usual)) for rank in range(3))
        return trainers[-3:]

    def end() -> None:
        while trainers:
            trainers.pop().end()

    try:
        yield play
        end()
        for trainer in play(usual=Plot(steps=3)):
            assert trainer.wait_for_end().what == "done", trainer.events
    finally:
        end()


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("ps", SIGKILL),
        pytest.param("ps", SIGSTOP, marks=pytest.mark.extended),
        pytest.param("ring", SIGSTOP, marks=pytest.mark.ring),
    ],
)
def test_a_killed_or_stopped_trainer_is_named(
    cluster: LocalCluster, play: Play, strategy: str, number: Signals
) -> None:
    trainers = play({1: Plot(hangs_after=3)} if number == SIGKILL else {})  # killed while the others are at the barrier
    for trainer in trainers:
        trainer.wait_for("round", 3)
    at = trainers[1].signal(number)
    survivors = trainers[0], trainers[2]
    for trainer in survivors:
        end = trainer.wait_for_end()
        assert (end.what, end.facts["ranks"]) == ("trainer_lost", [1])
        assert "trainer 1 was lost: no heartbeat for" in end.text
        assert end.at - at < LEASE_SECONDS + SLACK_SECONDS
    failure = cluster.status().failure
    assert failure is not None
    assert failure["detail"] in end.text
    if number == SIGSTOP:
        trainers[1].signal(SIGCONT)
        end = trainers[1].wait_for_end()  # it gets the same error when it continues
        assert (end.what, end.facts["ranks"]) == ("trainer_lost", [1])
    newest = max(event.round for trainer in survivors for event in trainer.events)
    rounds = [cluster.view.pserver_state(index).round for index in range(cluster.num_pservers)]
    assert rounds in ([newest] * len(rounds), [newest + 1] * len(rounds))


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        pytest.param(
            "ps",
            "trainer 2 did not reach the batch barrier of round 4 within the round time-out of 2 s",
            marks=pytest.mark.extended,
        ),
        pytest.param("ring", "trainer 2 did not contribute to round 4 in the ring", marks=pytest.mark.ring),
    ],
)
def test_a_trainer_that_hangs_while_its_heartbeats_live_is_named(
    cluster: LocalCluster, play: Play, strategy: str, said: str
) -> None:
    trainers = play({2: Plot(hangs_after=3)})
    at = trainers[2].wait_for("hanging").at
    for trainer in trainers[:2]:
        end = trainer.wait_for_end()
        assert (end.what, end.facts["missing"]) == ("round_timeout", [2])
        assert said in end.text
        assert ROUND_TIMEOUT_SECONDS - 0.5 < end.at - at < ROUND_TIMEOUT_SECONDS + SLACK_SECONDS
    failure = cluster.status().failure
    assert failure is not None
    assert (failure["code"], failure["missing"]) == ("round_timeout", [2])  # not a trainer that stopped waiting
    trainers[2].wake()
    end = trainers[2].wait_for_end()
    assert end.what == "round_timeout"
    assert said in end.text


@pytest.mark.parametrize("strategy", [in_a_ring])
@pytest.mark.parametrize("dies", [0, 2])
def test_a_death_ends_the_run_of_trainers_with_batches_left(
    cluster: LocalCluster, play: Play, strategy: str, dies: int
) -> None:
    trainers = play({0: Plot(steps=4)})
    trainers[1].wait_for("round", 8)
    at = trainers[dies].signal(SIGKILL)
    for trainer in (t for t in trainers if t.rank != dies):
        end = trainer.wait_for_end()
        assert end.at - at < LEASE_SECONDS + SLACK_SECONDS
        assert end.what == ("done" if trainer.rank == 0 else "trainer_lost")  # it is nothing to one that is done
    assert cluster.status().state == "failed"


@pytest.mark.parametrize("number", [SIGKILL, SIGSTOP])
@pytest.mark.extended
def test_a_pserver_that_is_killed_or_stopped(cluster: LocalCluster, play: Play, number: Signals) -> None:
    trainers = play()
    for trainer in trainers:
        trainer.wait_for("round", 3)
    victim = cluster.pservers[-1]
    index = int(victim.name.split()[-1])
    victim.signal(number)
    at = time.monotonic()
    for trainer in trainers:
        error = trainer.wait_for_end()
        assert error.what in ("pserver_lost", "unreachable"), error
        assert f"pserver {index}" in error.text
        assert error.at - at < LEASE_SECONDS + SLACK_SECONDS
    if number == SIGKILL:
        victim.wait(10)
        cluster.start_pserver(index)
    else:
        victim.signal(SIGCONT)
    wait_for_pservers(cluster)


def test_a_coordinator_that_was_never_started() -> None:
    with socket.socket() as silent:  # bound and not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(Unreachable, match=f"{address} did not answer for 0.5 s .*Check its address"):
            connect(address, retry_seconds=0.5)
        assert 0.5 < time.monotonic() - begun < 0.5 + SLACK_SECONDS


# ---------------------------------------------------------------------- scripts


def assert_all_name(cluster: LocalCluster, ranks: tuple[int, ...], reason: str) -> None:
    for rank in ranks:
        said = f"[trainer {rank}] gradpost: {reason}"
        assert any(line.startswith(said) for line in cluster.output), "\n".join(cluster.output)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["ps", in_a_ring])
def test_a_script_that_raises_is_named_with_its_reason(cluster: LocalCluster, strategy: str) -> None:
    command = [sys.executable, str(SCRIPT), "9", "0", "1:3:raise"]
    assert cluster.run_trainers(command, timeout=60, env={"PYTHONPATH": str(ROOT)}) == [1, 1, 1], cluster.output
    assert_all_name(cluster, (0, 2), "trainer 1 failed: ValueError: no data")
    assert cluster.summary().line().startswith("failed: mode=sync")


@pytest.fixture
def ring_cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Start a ring of three trainers for one test."""
    lease: float = getattr(request, "param", LEASE_SECONDS)
    with LocalCluster(pservers=0, strategy="ring", **{**SETTINGS, "lease_seconds": lease}) as cluster:
        yield cluster


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
    found = [trainer.heartbeat for trainer in ring_cluster.status().trainers if trainer.rank == rank]
    return any(trainer.round == round_ and trainer.waiting_seconds > 0 for trainer in found)


@pytest.mark.ring
@pytest.mark.extended
@pytest.mark.parametrize("ring_cluster", [LONG_LEASE], indirect=True, ids=["long lease"])
def test_an_interrupt_of_a_trainer_that_is_done_is_reported_at_once(ring_cluster: LocalCluster, tmp_path: Path) -> None:
    command = write_script(tmp_path, rounds=UNEQUAL)
    children = [ring_cluster.start_trainer(rank, command) for rank in range(3)]
    for text in ("this trainer has no batches left", "[trainer 1] round 30"):
        assert wait_until(lambda text=text: any(text in line for line in ring_cluster.output), 60), ring_cluster.output
    children[0].signal(SIGINT)
    assert [child.wait(LONG_LEASE / 2) for child in children[1:]] == [1, 1]  # it is not its lease that ends
    assert_all_name(ring_cluster, (1, 2), "trainer 0 failed: KeyboardInterrupt")


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
    assert_all_name(ring_cluster, (1, 2), "trainer 0 failed: it left in the middle of round 7")


@pytest.mark.ring
@pytest.mark.extended
def test_a_trainer_that_is_done_waits_for_longer_than_the_others(ring_cluster: LocalCluster, tmp_path: Path) -> None:
    """A trainer's own limit, of 5 s here, is two round time-outs and a lease."""
    command = write_script(
        tmp_path,
        rounds="(4 if session.rank == 0 else 9)",
        begin="import time; from trainer_client.engines.collective import ring_group; ring_group.SPARE_SECONDS = 0.0",
        in_each_round="if session.rank == 2 and optimizer.round == 9: time.sleep(6)  # it scores its model",
    )
    assert ring_cluster.run_trainers(command, timeout=60) == [0, 0, 0], ring_cluster.output
    assert not [line for line in ring_cluster.output if "no longer takes part" in line]
    assert ring_cluster.status().state == "finished"


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
