"""The lag of a replica, compared with a model that remembers everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.pserver.following.lag import MAX_REPORTS, Lag

EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40)


@given(EVENTS)
def test_the_lag_is_counted_from_the_first_report_of_a_missing_round(events: list[tuple[bool, int]]) -> None:
    lag, newest, first_reports, round_ = Lag(), 0, {}, 0
    for now, (is_report, number) in enumerate(events):
        if is_report:
            lag.note_leader(number, now)
            for later in range(max(newest, round_) + 1, number + 1):
                first_reports[later] = now
            newest = max(newest, number)
        else:
            round_ = max(round_, number)
            lag.note_applied(round_, 10)
        missing = [at for later, at in first_reports.items() if later > round_]
        assert lag.rounds == max(0, newest - round_)
        assert lag.num_bytes in (0, 10 * lag.rounds)  # 0 before the first record
        assert lag.seconds(now) == (now - min(missing) if missing else 0)


def test_the_reports_are_bounded_and_end_with_another_replica() -> None:
    lag = Lag()
    for round_ in range(1, 3 * MAX_REPORTS):
        lag.note_leader(round_, float(round_))
    assert (lag.rounds, lag.seconds(5000.0)) == (3 * MAX_REPORTS - 1, 4999.0)
    assert len(lag._reports) == MAX_REPORTS
    lag.reset(7)
    assert (lag.round, lag.rounds, lag.seconds(5000.0)) == (7, 0, 0.0)
