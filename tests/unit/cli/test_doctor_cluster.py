"""What the doctor makes of what a cluster tells, and of what this machine finds there."""

from __future__ import annotations

import pytest

from gradpost.doctor.cluster import (
    check_addresses,
    check_clocks,
    check_disks,
    check_pserver,
    check_run,
    check_versions,
)
from gradpost.doctor.links import check_links, links_table
from gradpost.doctor.reach import Reached
from ps_protocol.messages import ClusterStatus, Link, PserverState, PserverStatus, Software, Traffic, TrainerStatus
from ps_protocol.software import this_software

from .test_status import STATE

OURS = this_software()


def pserver(
    index: int, address: str = "http://10.0.0.7:7071", software: Software | None = OURS, *, http2: bool = True
) -> PserverStatus:
    return PserverStatus(
        index=index, address=address, http2=http2, incarnation=1, round=1, missing=(), waiting_seconds=0.0,
        heartbeat_age_seconds=0.1, software=software,
    )  # fmt: skip


def link(pushes: float = 0.0, pulls: float = 0.0, request_bytes: int = 4_000_000, is_local: bool = False) -> Link:
    """At so many MB a second."""

    def traffic(speed: float) -> Traffic:
        return Traffic(num_requests=10, num_bytes=10 * request_bytes, seconds=request_bytes / speed / 1e5)

    return Link(is_local=is_local, round_trip_seconds=0.002, pushes=traffic(pushes or 100), pulls=traffic(pulls or 100))


def trainer(rank: int, **told: object) -> TrainerStatus:
    return TrainerStatus.model_validate(
        {
            "rank": rank, "incarnation": 1, "round": 1, "state": "declared", "heartbeat_age_seconds": 0.1,
            "metrics_address": None, "results": {}, "software": OURS, **told,
        }
    )  # fmt: skip


def status(**changes: object) -> ClusterStatus:
    return STATE.model_copy(
        update={"state": "training", "failure": None, "waiting_for": (), "software": OURS, "pservers": (), **changes}
    )


def test_versions() -> None:
    assert check_versions(status(trainers=(trainer(0),))).level == "ok"
    older = OURS.model_copy(update={"torch": "2.0"})
    finding = check_versions(
        status(pservers=(pserver(0), pserver(1, software=None)), trainers=(trainer(7, software=older),))
    )
    assert finding.level == "warning"
    assert f"torch 2.0 (trainer 7); {OURS.torch} (this machine, coordinator, pserver 0)" in finding.detail
    gone = trainer(7, software=older, state="lost")
    assert check_versions(status(trainers=(gone,))).level == "ok"


@pytest.mark.parametrize(
    ("coordinator", "addresses", "levels"),
    [
        ("http://127.0.0.1:7070", ["http://127.0.0.1:1", "http://localhost:2"], ["ok"]),
        ("http://10.0.0.1:7070", ["http://10.0.0.2:1", "http://ps-1.example:1"], ["ok"]),
        ("http://10.0.0.1:7070", ["http://127.0.0.1:1", "http://127.0.0.1:2"], ["broken"]),
        ("http://127.0.0.1:7070", ["http://10.0.0.2:1", "http://[::1]:2"], ["broken"]),
        ("http://10.0.0.1:7070", ["http://10.0.0.2:1", "http://10.0.0.2:1"], ["broken"]),
        ("http://10.0.0.1:7070", [], []),
    ],
)
def test_addresses(coordinator: str, addresses: list[str], levels: list[str]) -> None:
    pservers = [pserver(index, address) for index, address in enumerate(addresses)]
    assert [finding.level for finding in check_addresses(coordinator, pservers)] == levels


def reached(**what: object) -> Reached:
    state = PserverState(
        index=0, incarnation=1, run=None, round=0, members=(), missing=(), waiting_seconds=0, num_blocks=0,
        shard_bytes=0, pushed_bytes=0, pulled_bytes=0, transports=(), digest=None, failure=None,
    )  # fmt: skip
    facts = {"state": state, "http_version": "HTTP/2", "round_trip_seconds": 0.001, "speed_to": 1e8, "speed_from": 1e8}
    return Reached("http://10.0.0.7:7071", **{**facts, **what})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "level", "words"),
    [
        (reached(), "ok", "is it, 1.0 ms, HTTP/2, 100 MB/s there, 100 MB/s back"),
        (reached(http_version="HTTP/1.1"), "broken", "do not get through over HTTP/2"),
        (reached(speed_from=5e6), "warning", "5 MB/s back"),
        (reached(speed_to=None, speed_from=None), "ok", "speed not measured"),
        (reached(trouble="reset"), "broken", "but tensors do not get through: reset"),
        (Reached("http://10.0.0.7:7071", trouble="no answer"), "broken", "is not reached from here: no answer"),
    ],
)
def test_a_pserver(one: Reached, level: str, words: str) -> None:
    finding = check_pserver(pserver(0), one, status(), with_speed=True)
    assert (finding.level, words in finding.detail) == (level, True), finding
    assert (finding.advice == "") == (finding.why == "") == (level == "ok")


def test_a_pserver_without_http2() -> None:
    one = reached(http_version="HTTP/1.1")
    finding = check_pserver(pserver(0, http2=False), one, status(), with_speed=True)
    assert (finding.level, "HTTP/1.1, 100 MB/s" in finding.detail) == ("warning", True)


def test_a_pserver_that_only_others_reach() -> None:
    seen = status(trainers=(trainer(3, links={0: link()}),))
    finding = check_pserver(pserver(0), Reached("http://10.0.0.7:7071", trouble="no route"), seen, with_speed=True)
    assert (finding.level, "trainer 3 does reach it" in finding.why) == ("warning", True)


def test_clocks() -> None:
    assert check_clocks([("coordinator", Reached("x"))]).level == "skipped"
    assert check_clocks([("coordinator", Reached("x", clock_seconds=0.4))]).level == "ok"
    finding = check_clocks(
        [("coordinator", Reached("x", clock_seconds=-90)), ("pserver 1", Reached("y", clock_seconds=7))]
    )
    assert (finding.level, finding.detail) == (
        "warning", "coordinator is 90 s behind, pserver 1 is 7 s ahead of this machine"
    )  # fmt: skip


def test_disks() -> None:
    assert check_disks([(pserver(0), Reached("x"))]).level == "skipped"
    assert check_disks([(pserver(0), Reached("x", disk=(5e10, 1e11)))]).level == "ok"
    finding = check_disks([(pserver(0), Reached("x", disk=(5e10, 1e11))), (pserver(1), Reached("y", disk=(9e9, 1e11)))])
    assert (finding.level, finding.detail) == ("warning", "pserver 1 has 9.0 GB left of 100 GB")


def test_links_of_a_ring() -> None:
    [finding] = check_links(status(num_pservers=0, pservers=(), trainers=(trainer(0),)))
    assert (finding.level, "a ring" in finding.detail) == ("skipped", True)


def test_links() -> None:
    assert check_links(status(trainers=()))[0].level == "skipped"
    assert check_links(status(trainers=(trainer(0),)))[0].level == "skipped"
    well = [trainer(rank, links={0: link(100, 100), 1: link()}) for rank in range(2)]
    assert check_links(status(trainers=well))[0].level == "ok"
    slow = trainer(2, links={0: link(pushes=20), 1: link()})
    [finding] = check_links(status(trainers=[*well, slow]))
    assert finding.detail == "trainer 2 pushes 20 MB/s to pserver 0; 100 MB/s are usual here"
    small = trainer(2, links={0: link(pushes=1, request_bytes=50_000), 1: link()})  # bound by its round trips
    assert check_links(status(trainers=[*well, small]))[0].level == "ok"
    assert check_links(status(mode="async", trainers=[*well, slow]))[0].level == "ok"  # it may have waited
    slow = trainer(2, links={0: link(pulls=10), 1: link()})
    [finding] = check_links(status(mode="async", trainers=[*well, slow]))
    assert finding.detail == "trainer 2 pulls 10 MB/s from pserver 0; 100 MB/s are usual here"
    fast, busy = link(4500, 4500), link(4500, 800)  # 4 ms more a pull, on a machine that does other things too
    well = [trainer(0, links={0: fast, 1: fast}), trainer(1, links={0: fast, 1: busy})]
    assert check_links(status(trainers=well))[0].level == "ok"
    [finding] = check_links(status(trainers=[trainer(1, links={0: link()}, unreachable={1: 12.3})]))
    assert (finding.level, finding.detail) == ("broken", "trainer 1 has not reached pserver 1 for 12 s")


def test_the_matrix() -> None:
    trainers = (
        trainer(0, links={0: link(), 1: link(request_bytes=5000)}),
        trainer(1, links={1: link(50, 80, is_local=True)}),
    )
    table = links_table(status(trainers=trainers))
    assert table is not None
    assert table.lines() == [
        "from / to  pserver 0                             pserver 1",
        "trainer 0  2.0 ms, push 100 MB/s, pull 100 MB/s  2.0 ms, 5 kB a push: no speed",
        "trainer 1  not connected                         Unix socket, 2.0 ms, push 50 MB/s, pull 80 MB/s",
    ]
    assert links_table(status(trainers=())) is None


def test_a_run_that_does_not_go_on() -> None:
    assert check_run(status()) == []
    assert check_run(status(state="gathering", waiting_for=("pserver 1",))) == []
    assert check_run(status(waiting_for=("pserver 1",)))[0].level == "warning"
    assert check_run(STATE)[0].detail == "it has failed: trainer 0 was lost (trainer_lost)"
