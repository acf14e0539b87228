"""Whoever comes back, and whatever the run goes back to: every round has the scale that it has in one process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
import torch

from ..soaking import parametrize_sampled
from .conftest import Carrier
from .faulty_run import SCRIPT, FaultyRun, expected_result
from .scaling_script import GROWTH_INTERVAL, INIT_SCALE, overflows
from .test_resume import train

pytestmark = [pytest.mark.cluster, pytest.mark.amp, pytest.mark.extended, pytest.mark.timeout(300)]

SCALING_SCRIPT = SCRIPT.with_name("scaling_script.py")


def is_skipped(round_: int) -> bool:
    return overflows(0, round_) or overflows(1, round_)


def expected_scales(rounds: int, max_delay: int = 0) -> dict[int, float]:
    """By round, of torch's own GradScaler; the outcome of a round counts `max_delay` rounds later."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    scales = dict.fromkeys(range(1, max_delay + 2), INIT_SCALE)
    for round_ in range(1, rounds + 1):
        scaler.scale(weight.sum() * (float("inf") if is_skipped(round_) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales[round_ + 1 + max_delay] = scaler.get_scale()
    return scales


def check_scales(lines: Iterable[str], rounds: int, max_delay: int = 0) -> None:
    expected = expected_scales(rounds, max_delay)
    told: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        # A log line of another thread may stand before it, or behind.
        if found := re.search(r"^\[trainer (\d)\].*scale (\d+) (\d+\.\d+)", line):
            told.setdefault(found[1], []).append((int(found[2]), float(found[3])))
    assert sorted(told) == ["0", "1"]
    for rank, rounds_and_scales in told.items():
        assert {round_ for round_, _ in rounds_and_scales} == set(range(1, rounds + 1)), f"trainer {rank}"
        wrong = [(round_, scale) for round_, scale in rounds_and_scales if scale != expected[round_]]
        assert not wrong, f"trainer {rank} had {wrong}"
    assert len({expected[round_] for round_ in range(1, rounds + 1)}) > 3


def result_of(rounds: int) -> list[str]:
    return [expected_result(rounds, skipped=set(filter(is_skipped, range(1, rounds + 1))))] * 2


@parametrize_sampled(("rank", "max_delay"), [(0, 0), (0, 2), (1, 0), (1, 2)], [(0, 2)])
def test_a_trainer_that_was_killed_comes_back_to_the_others_scale(carrier: Carrier, rank: int, max_delay: int) -> None:
    with FaultyRun(60, **carrier, script=SCALING_SCRIPT, nonfinite="skip_round", max_delay=max_delay) as run:
        run.wait_for_round(24)
        run.kill(run.cluster.trainers[rank])
        run.start_trainer(rank)
        results = run.results()
        check_scales(run.lines, 60, max_delay)
    if max_delay == 0:  # else parameters depend on the time
        assert results == result_of(60)


@parametrize_sampled("overlap", ["false", "true"], ["false"])
def test_pservers_that_come_back_know_it_too(carrier: Carrier, tmp_path: Path, overlap: str) -> None:
    environment = {"GRADPOST_OVERLAP": overlap, "GRADPOST_OVERLAP_PULLS": overlap, "GRADPOST_BUCKET_BYTES": "500"}
    with FaultyRun(
        60, **carrier, script=SCALING_SCRIPT, nonfinite="skip_round", environment=environment, checkpoint_rounds=10
    ) as run:
        run.wait_for_round(22)
        run.kill(run.cluster.trainers[1])
        for index in range(2):
            run.kill(run.cluster.pservers[index])
            run.cluster.start_pserver(index)
        run.start_trainer(1)
        assert run.results() == result_of(60)
        check_scales(run.lines, 60)


@parametrize_sampled("overlap", ["false", "true"], ["true"])
def test_a_run_that_goes_back_has_the_same_scales_again(carrier: Carrier, overlap: str) -> None:
    environment = {"GRADPOST_OVERLAP": overlap, "GRADPOST_OVERLAP_PULLS": overlap, "GRADPOST_BUCKET_BYTES": "500"}
    with FaultyRun(150, **carrier, script=SCALING_SCRIPT, nonfinite="skip_round", environment=environment) as run:
        run.wait_for_round(20)
        made = run.make_checkpoint()
        run.wait_for_round(made + 11)
        answer = httpx.post(f"{run.cluster.address}/v1/rollback", json={"round": made}, timeout=30)
        assert answer.is_success, answer.text
        run.wait_for_line("steps of this trainer are lost", of="trainer 0")
        assert run.results() == result_of(150)
        check_scales(run.lines, 150)


def test_a_resumed_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    """It stops after a round that was skipped, whose outcome is in no scale yet; and has other pservers then."""
    assert is_skipped(26)
    first = train(tmp_path, script=SCALING_SCRIPT, rounds=26, GRADPOST_NONFINITE="skip_round")
    second = train(
        tmp_path, "--resume", "--pservers", 3, script=SCALING_SCRIPT, rounds=50, GRADPOST_NONFINITE="skip_round"
    )
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    check_scales([*first[1].splitlines(), *second[1].splitlines()], 50)
