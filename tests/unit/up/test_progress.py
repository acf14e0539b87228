from __future__ import annotations

from typing import Any

import pytest

from gradpost.up.progress import describe, print_summary
from ps_protocol.messages import ClusterStatus, PserverStatus, RunSummary, ShardSummary


def make_status(**changes: Any) -> ClusterStatus:
    values: dict[str, Any] = {
        "run": "5f0c", "state": "training", "mode": "sync", "num_pservers": 1, "num_trainers": 2, "waiting_for": (),
        "failure": None, "plan_digest": "d", "num_parameters": 1, "parameter_bytes": 4, "round": 7, "pservers": (),
        "trainers": (),
    }  # fmt: skip
    return ClusterStatus(**{**values, **changes})


def make_summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "run": "5f0c", "state": "finished", "mode": "sync", "transport": "HTTP/2", "num_trainers": 2, "rounds": 1234,
        "seconds": 61.7, "results": {"loss": 0.25, "accuracy": 0.98333},
        "shards": (ShardSummary(pserver=0, shard_bytes=1000, pushed_bytes=2_000_000, pulled_bytes=3_000_000),),
    }  # fmt: skip
    return RunSummary(**{**values, **changes})


def make_pserver(waiting_seconds: float) -> PserverStatus:
    return PserverStatus(
        index=0, address="http://p", incarnation=1, round=7, missing=(1,), waiting_seconds=waiting_seconds,
        heartbeat_age_seconds=0,
    )  # fmt: skip


SHARD = {"pushed_bytes_per_second": 45_600_000.0, "pulled_bytes_per_second": None}
RATES = {"at": [100.0, 101.0, 102.0], "rounds_per_second": [None, 0.0, 9.0]}
ACTIVITY = {"at": 107.0, "rounds_per_second": 12.34, "remaining_seconds": 83.0, "pservers": [SHARD], "rates": RATES}
NO_RATES = {"at": [], "rounds_per_second": []}
IDLE = {"at": 107.0, "rounds_per_second": None, "remaining_seconds": None, "pservers": [], "rates": NO_RATES}


def test_the_live_line() -> None:
    assert describe(make_status(state="gathering", waiting_for=("trainer 0", "pserver 1")), make_summary(), IDLE) == (
        "waiting for trainer 0, pserver 1"
    )
    line = describe(make_status(), make_summary(), ACTIVITY)
    time = "elapsed 1:01  remaining 1:23"
    assert line == f"training: round 1,234  12.3 rounds/s  45.6 MB/s  {time}  accuracy 0.9833  loss 0.25"
    early = describe(make_status(), make_summary(), {**ACTIVITY, "at": 106.9})
    assert early == "training: round 1,234  45.6 MB/s  elapsed 1:01  accuracy 0.9833  loss 0.25"
    ended = describe(make_status(state="finished"), make_summary(results={}), IDLE)
    assert ended == "finished: round 1,234  elapsed 1:01"
    interrupted = describe(make_status(state="failed"), make_summary(results={}), IDLE, is_interrupted=True)
    assert interrupted == "interrupted: round 1,234  elapsed 1:01"


def test_the_live_line_names_the_missing_trainers_of_a_slow_round() -> None:
    slow = describe(make_status(pservers=(make_pserver(5),)), make_summary(), IDLE)
    assert "  waiting for trainer 1 (5 s)  accuracy" in slow
    assert "waiting" not in describe(make_status(pservers=(make_pserver(0.5),)), make_summary(), IDLE)


def test_the_report_ends_with_the_runs_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_summary(), as_json=False)
    assert capsys.readouterr().out == (
        "\n"
        "rounds  seconds  seconds a round  accuracy  loss\n"
        " 1,234     61.7           0.0500    0.9833  0.25\n"
        "\n"
        "pserver  shard bytes  pushed bytes  pulled bytes\n"
        "      0        1,000     2,000,000     3,000,000\n"
        "\n"
        "trained: mode=sync transport=HTTP/2 accuracy=0.9833 rounds=1234 seconds=61.7\n"
    )


def test_the_report_of_a_resumed_run_has_its_new_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_summary(earlier_rounds=1200, seconds=8.5, results={}, shards=()), as_json=False)
    assert capsys.readouterr().out == (
        "\n"
        "rounds  new rounds  seconds  seconds a round\n"
        " 1,234          34      8.5           0.2500\n"
        "\n"
        "trained: mode=sync transport=HTTP/2 rounds=1234 new_rounds=34 seconds=8.5\n"
    )
    print_summary(make_summary(earlier_rounds=1234, results={}), as_json=False)
    assert " 1,234           0     61.7                –\n" in capsys.readouterr().out


def test_the_json_report_contains_nan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_summary(results={"loss": float("nan")}, rounds=0), as_json=True)
    output = capsys.readouterr().out
    assert '"loss": "NaN"' in output
    assert '"seconds_a_round": 0.0' in output
