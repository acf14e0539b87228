"""Golden runs end with the bits that were recorded, and notice when arithmetic changes."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from .clusters import Digests, differences, read_recorded, same_arithmetic, train
from .runs import SETUPS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the digests are those of x86-64 Linux"
    ),
]

RECORDED = read_recorded()
ROUNDED, FED_BACK = "AdamW", "push and pull int8"  # runs of the synchronous cluster
SABOTAGES = {  # and the runs that change
    "change_nothing": set(),
    "change_rounding": {ROUNDED, FED_BACK},
    "swap_ranks": {ROUNDED, FED_BACK},
    "skip_feedback": {FED_BACK},
    "count_one_step_more": {ROUNDED},
    "forget_moments": {ROUNDED},
    "couple_decay": {ROUNDED},
    "truncate": {FED_BACK},
    "scale_in_half": {FED_BACK},
}
SAMPLED = "change_nothing", "swap_ranks", "skip_feedback"

Found = dict[str, Future[dict[str, Digests]]]  # by cluster, or sabotage


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """The clusters of the selected tests, which train two at a time."""
    selected = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    names = {name for item in selected for name in item.callspec.params.values()}
    with same_arithmetic(), ThreadPoolExecutor(2) as pool:
        clean = {name: pool.submit(train, name, tmp_path_factory.mktemp("golden")) for name in SETUPS if name in names}
        sabotaged = {
            name: pool.submit(train, "sync", tmp_path_factory.mktemp("golden"), (ROUNDED, FED_BACK), name)
            for name in SABOTAGES
            if name in names
        }
        yield clean | sabotaged
        pool.shutdown(cancel_futures=True)


def test_every_run_has_been_recorded_and_no_other() -> None:
    assert {(name, run) for name in RECORDED for run in RECORDED[name]} == {
        (name, run) for name in SETUPS for run in SETUPS[name].runs
    }


@pytest.mark.parametrize(("cluster", "run"), [(name, run) for name in SETUPS for run in SETUPS[name].runs])
def test_a_run_ends_with_the_recorded_bits(cluster: str, run: str, found: Found) -> None:
    changed = differences(f"{cluster}: {run}", found[cluster].result()[run], RECORDED[cluster][run])
    assert not changed, "\n".join(changed)


@pytest.mark.parametrize(
    "sabotage",
    [
        "change_rounding",
        *(pytest.param(each, marks=pytest.mark.extended) for each in SAMPLED),
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in SABOTAGES
            if each not in ("change_rounding", *SAMPLED)
        ),
    ],
)
def test_broken_arithmetic_is_noticed(sabotage: str, found: Found) -> None:
    for run, digests in found[sabotage].result().items():
        halves = {half for half in digests if digests[half] != RECORDED["sync"][run][half]}
        assert halves == ({"parameters", "optimizer_state"} if run in SABOTAGES[sabotage] else set()), run
