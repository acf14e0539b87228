"""The end of a run, while something dies: who is done says so, and what is lost then is not passed over in silence."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch

from services.pserver.durable.records import Record, read_records
from services.pserver.durable.update_log import Update, list_segments
from trainer_client.testing import LocalCluster

from .faulty_run import SCRIPT, FaultyRun

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(180)]

COUNTING = SCRIPT.with_name("counting_script.py")


def lose_the_log_after(round_: int, state_dir: Path) -> None:
    """As after a power loss under `log`: whole records are missing, so that nothing looks torn."""
    for segment in list_segments(state_dir / "pserver-0" / "log"):
        if segment.base >= round_:
            segment.path.unlink()
            continue
        with segment.path.open("rb") as file:
            records = (item for item in read_records(file.fileno(), segment.mark) if isinstance(item, Record))
            ends = {Update.from_record(record).round: record.end for record in records}
        os.truncate(segment.path, ends[round_])


class Lines:
    """What a cluster has printed; to be its `on_line`."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._more = threading.Condition()

    def __call__(self, name: str, line: str) -> None:
        with self._more:
            self._lines.append(line)
            self._more.notify_all()

    def wait_for(self, text: str) -> None:
        with self._more:
            found = self._more.wait_for(lambda: any(text in line for line in self._lines), 30)
            assert found, f"waited in vain for {text!r}: {self._lines[-20:]}"


def run_script(folder: Path, script: str, **settings: Any) -> LocalCluster:
    """A cluster, not started yet, for a script that is written to the folder."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    return LocalCluster(pservers=1, lease_seconds=2, **settings)


QUICK = """
    import time, torch
    from trainer_client import RemoteOptimizer
    model = torch.nn.Linear(4, 4)
    optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print("trained", flush=True)
    time.sleep(1.5)  # until the coordinator has been killed
"""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_script_that_ends_while_the_coordinator_is_away_is_not_lost(tmp_path: Path, host: str) -> None:
    """It leaves when the interpreter ends, where no thread of a pool looks up a name any more."""
    lines = Lines()
    with run_script(tmp_path, QUICK, trainers=1, rejoin_timeout_seconds=10, on_line=lines) as cluster:
        address = cluster.address.replace("127.0.0.1", host)
        child = cluster.start_trainer(
            0, [sys.executable, str(tmp_path / "script.py")], {"GRADPOST_COORDINATOR": address}
        )
        lines.wait_for("trained")
        cluster.coordinator.signal(SIGKILL)
        cluster.coordinator.wait(10)
        lines.wait_for("waiting for the coordinator")
        cluster.restart_coordinator()
        assert child.wait(30) == 0
        assert cluster.summary().state == "finished"


def test_rounds_that_are_lost_when_somebody_is_done_end_the_run(tmp_path: Path) -> None:
    """The others would train them again without its part, or not at all: wrong numbers, or older ones."""
    with FaultyRun(40, pservers=1, state_dir=str(tmp_path)) as run:
        run.cluster.trainers[1].signal(SIGKILL)
        run.rounds = 400
        run.start_trainer(1)  # has more to do than the other
        assert run.cluster.trainers[0].wait(60) == 0
        run.kill(run.cluster.pservers[0])
        lose_the_log_after(37, tmp_path)
        run.cluster.start_pserver(0)
        assert run.cluster.trainers[1].wait(60) == 1
        said = run.wait_for_line("Ended: rounds", of="trainer 1")
        assert "cannot be repeated, because trainer 0 left" in said


def test_a_finished_run_whose_last_rounds_are_lost_is_not_finished(tmp_path: Path) -> None:
    with FaultyRun(20, pservers=1, state_dir=str(tmp_path), failpoints="checkpoint.shard=kill@2") as run:
        assert [child.wait(60) for child in run.cluster.trainers] == [0, 0]
        run.cluster.pservers[0].wait(30)
        lose_the_log_after(17, tmp_path)
        run.cluster.start_pserver(0, GRADPOST_FAILPOINTS="")
        run.wait_for_line("rounds 18 to 20 are lost")
        status = run.cluster.status()
        assert (status.state, (status.failure or {})["code"]) == ("failed", "pserver_lost")


def test_asynchronous_a_log_that_has_lost_its_end_is_gone_on_from(tmp_path: Path) -> None:
    settings = {"mode": "async", "durability": "log", "round_timeout_seconds": 5}
    with FaultyRun(60, pservers=1, state_dir=str(tmp_path), script=COUNTING, **settings) as run:
        run.wait_for_round(20)
        run.kill(run.cluster.pservers[0])
        lose_the_log_after(30, tmp_path)
        run.cluster.start_pserver(0)
        for child in run.cluster.trainers:
            assert child.wait(60) == 0
        run.wait_for_line("steps that an earlier incarnation of this pserver acknowledged are lost")


AMP = """
    import torch
    from trainer_client import RemoteOptimizer, connect
    session = connect()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for iteration in range(1, 7):
        optimizer.zero_grad()
        factor = 1e38 if session.rank == 1 and iteration == 3 else 1.0
        scaler.scale((model(torch.ones(3, 4)) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.round == iteration, "the trainers are in different rounds"
    print("bias", model.bias.tolist(), flush=True)
"""


def test_an_overflow_of_one_trainers_gradscaler_skips_the_round_for_all(tmp_path: Path) -> None:
    with run_script(tmp_path, AMP, trainers=2, nonfinite="skip_round") as cluster:
        assert cluster.run_trainers([sys.executable, str(tmp_path / "script.py")], timeout=60) == [0, 0]
        printed = {line.partition("bias ")[2] for line in cluster.output if "bias" in line}
        skipped = [line for line in cluster.output if "round 3 was skipped on all pservers" in line]
        assert len(printed) == 1
        assert len(skipped) == 2
    torch_bias = expected_amp_bias()
    assert printed == {str(torch_bias)}


def expected_amp_bias() -> list[float]:
    """Five steps of the six, in one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    bias: list[float] = model.bias.tolist()
    return bias


@pytest.mark.parametrize("policy", [pytest.param("reject", marks=pytest.mark.extended), "allow"])
def test_unless_rounds_are_skipped_an_overflow_is_an_error_that_says_what_to_do(tmp_path: Path, policy: str) -> None:
    with run_script(tmp_path, AMP, trainers=2, on_trainer_loss="fail", nonfinite=policy) as cluster:
        assert cluster.run_trainers([sys.executable, str(tmp_path / "script.py")], timeout=60) == [1, 1]
        assert any("NonFiniteGradient" in line and "it has to be skip_round" in line for line in cluster.output)


REFUSED = """
    import torch
    from ps_protocol.errors import ContributionConflict, NonFiniteGradient
    from trainer_client import RemoteOptimizer
    parameters = [(name, torch.nn.Parameter(torch.zeros(50_000))) for name in ("a", "b")]
    optimizer = RemoteOptimizer(torch.optim.SGD(parameters, lr=1.0), bucket_bytes=4096)

    def step(a, b):
        for (_, parameter), value in zip(parameters, (a, b)):
            parameter.grad = torch.full_like(parameter, value)
        try:
            optimizer.step()
        except (NonFiniteGradient, ContributionConflict) as error:
            print("error", type(error).__name__, error, flush=True)

    step(1.0, float("nan"))
    step(1.0, 2.0)  # the same, mended
    print("round", optimizer.round, flush=True)
    for _ in range(5):  # the push of a may be cancelled when that of b is refused
        step(1.0, float("nan"))
    step(3.0, 2.0)
"""


def test_after_a_refused_gradient_only_the_same_one_mended_can_follow(tmp_path: Path) -> None:
    with run_script(tmp_path, REFUSED, trainers=1, nonfinite="reject", slice_parameters=False) as cluster:
        cluster.run_trainers([sys.executable, str(tmp_path / "script.py")], timeout=60)
        said = [line.partition("] ")[2] for line in cluster.output if "] error" in line or "] round" in line]
    assert [line[:28].split()[:2] for line in said] == [
        ["error", "NonFiniteGradient"], ["round", "1"], *[["error", "NonFiniteGradient"]] * 5,
        ["error", "ContributionConflict"],
    ]  # fmt: skip
    assert "has to end" in said[-1]
    assert "NaN or infinity in block 'b.block0'" in said[-1]
