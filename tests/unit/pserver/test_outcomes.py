"""What answers say of the rounds before: which were skipped, and what the lowest rank's GradScaler was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.frames import parse_frame
from ps_protocol.membership import Controls
from ps_protocol.optimizers import HyperParameters
from ps_protocol.routes import BARRIER_HEADER, HYPER_PARAMETERS_KEY, VERDICT_HEADER
from services.pserver.durable.records import Record
from services.pserver.durable.update_log import Update
from services.pserver.history import History
from services.pserver.pulls import divide_rates

from .support import Bench, bench, encode, unchanged

pytestmark = pytest.mark.amp


async def push(b: Bench, rank: int, round_: int, scaler: HyperParameters | None) -> None:
    metadata = b.completion()
    if scaler is not None:
        metadata[HYPER_PARAMETERS_KEY] = json.dumps([*json.loads(metadata[HYPER_PARAMETERS_KEY]), scaler])
    await b.call("send", b.fence(rank, round_), encode(b.contribution(rank, round_), metadata))


async def play(b: Bench, round_: int, *scalers: HyperParameters | None, bad: tuple[int, ...] = ()) -> dict[str, str]:
    """One round of trainers with these GradScalers; the metadata of its version."""
    for rank, scaler in enumerate(scalers):
        await push(b, rank, round_, scaler)
    for rank in range(len(scalers)):
        verdict = {VERDICT_HEADER: "nonfinite"} if rank in bad else {}
        await b.call("barrier", b.fence(rank, round_), headers={BARRIER_HEADER: "batch", **verdict})
    return await metadata_of(b, round_)


async def metadata_of(b: Bench, round_: int) -> dict[str, str]:
    return dict(parse_frame(await b.get(0, round_)).metadata)


def state(after: int, scale: float = 1024.0) -> HyperParameters:
    return {"after": after, "scale": scale, "growth_tracker": after}


async def test_replies_carry_the_scaler_state_of_the_lowest_rank() -> None:
    async with bench(nonfinite="skip_round") as b:
        assert "grad_scaler" not in await play(b, 1, None, None)
        assert "grad_scaler" not in await play(b, 2, None, state(1))
        told = await play(b, 3, state(2, 8.0), state(2, 16.0), bad=(1,))
        assert json.loads(told["grad_scaler"]) == state(2, 8.0)
        assert told["skipped_for"] == "[1]"
        assert not told.keys() & {"skipped_before"}
        assert "grad_scaler" not in await play(b, 4, None, None)


async def test_a_state_that_does_not_fit_and_another_one_in_the_same_round_are_refused() -> None:
    async with bench() as b:
        for wrong in ({}, state(0, float("nan"))):
            await unchanged(b, "bad_hyper_parameters", push(b, 0, 1, wrong))
        await push(b, 0, 1, state(0))
        await push(b, 0, 1, state(0))
        for other in (None, state(0, 8.0)):
            await unchanged(b, "contribution_conflict", push(b, 0, 1, other))


async def test_with_max_delay_replies_carry_the_outcomes_of_earlier_rounds() -> None:
    async with bench(nonfinite="skip_round", consistency=Consistency(max_delay=1)) as b:
        assert "skipped_before" not in await play(b, 1, None, None, bad=(0,))
        assert json.loads((await play(b, 2, None, None, bad=(0, 1)))["skipped_before"]) == {"1": [0]}
        told = await play(b, 3, None, None)
        assert "skipped_for" not in told
        assert json.loads(told["skipped_before"]) == {"2": [0, 1]}
        assert "skipped_before" not in await play(b, 4, None, None)


@pytest.mark.parametrize("checkpoint_rounds", [1, 100])
async def test_a_restarted_pserver_replies_the_same_outcomes(tmp_path: Path, checkpoint_rounds: int) -> None:
    settings: dict[str, Any] = {
        "state_dir": tmp_path,
        "durability": "log",
        "nonfinite": "skip_round",
        "checkpoint_rounds": checkpoint_rounds,
        "consistency": Consistency(max_delay=1),
    }
    async with bench(**settings) as b:
        await play(b, 1, state(0), state(0), bad=(1,))
        told = await play(b, 2, state(1), state(1), bad=(0,))
        assert {"skipped_for", "skipped_before", "grad_scaler"} <= told.keys()
    async with bench(incarnation=2, **settings) as b:
        assert await metadata_of(b, 2) == told


def test_outcomes_of_a_source_run_are_taken_over() -> None:
    history, source = History({9: (0,)}, {9: (0,)}), History({7: (0, 1)}, {7: (1,)}, {0: (1, 7)}, {}, state(6))
    history.adopt_outcomes(source)
    assert history == History({9: (0,)}, {9: (0,), 7: (1,)}, {}, {}, state(6))
    assert History.from_json(history.to_json()) == history


def test_the_state_outlives_a_round_without_trainers_and_changes_of_the_rate() -> None:
    history, numbers = History(), [{"lr": 0.1}, state(6)]
    history.add_round(7, (0,), (), None, numbers, keep=1)
    history.add_round(8, (), (), keep=1)
    assert history.scaler == state(6)
    history.add_round(9, (0,), (), None, [{"lr": 0.1}], keep=1)
    assert history.scaler is None
    assert Controls(rates={0: 0.5}).override_rates(numbers) == [{"lr": 0.5}, state(6)]
    assert divide_rates(numbers, 2) == [{"lr": 0.05}]


def test_logs_and_checkpoints_of_earlier_versions_have_the_state() -> None:
    old = "[[[7, [0]]], [], [], [], [[6, [5, 8.0, 2]], [7, [6, 1024.0, 6]]]]"
    assert History.from_json(old).scaler == state(6)
    metadata = {**Update(7, (0,), [{"lr": 0.1}], None).to_metadata(), "grad_scaler": json.dumps(state(6))}
    frame = parse_frame(encode({}, metadata))
    assert Update.from_record(Record(0, 0, frame, memoryview(b""))).hyper_parameters == [{"lr": 0.1}, state(6)]
