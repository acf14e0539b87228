"""Every pair of trainer and pserver, as the trainers themselves measure it on what they push and pull anyhow."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from ps_protocol.messages import ClusterStatus, Link, Traffic, TrainerStatus

from ..output import Column, Table
from .finding import Finding

MIN_REQUEST_BYTES = 1_000_000  # smaller ones are bound by their round trips, and say nothing of the bandwidth
SLOW_SHARE = 0.25  # of what is usual here
MIN_LOST_SECONDS = 0.01  # in a request, which is less than a scheduler on a busy machine may take
HERE = ("joined", "declared")


def check_links(status: ClusterStatus) -> list[Finding]:
    """Whether every trainer reaches every pserver, and none much more slowly than is usual here."""
    trainers = [trainer for trainer in status.trainers if trainer.state in HERE]
    if not status.num_pservers:
        return [Finding("links", "skipped", "a ring has no pservers; torch.distributed measures nothing of its links")]
    if not trainers:
        return [Finding("links", "skipped", "no trainer is here that could say how it reaches the pservers")]
    if not any(trainer.links for trainer in trainers):
        return [Finding("links", "skipped", "the trainers have not connected to the pservers yet: ask again later")]
    findings = [*_unreachable(trainers), *_slow(status, trainers)]
    num_pairs = sum(len(trainer.links) for trainer in trainers)
    return findings or [Finding("links", "ok", f"all {num_pairs} pairs of trainer and pserver, as trainers say")]


def _unreachable(trainers: list[TrainerStatus]) -> Iterator[Finding]:
    for trainer in trainers:
        for pserver, seconds in trainer.unreachable.items():
            yield Finding(
                "links", "broken", f"trainer {trainer.rank} has not reached pserver {pserver} for {seconds:.0f} s",
                "run gradpost doctor on its machine, which shows what is in the way from there",
                "no round ends without it",
            )  # fmt: skip


def _slow(status: ClusterStatus, trainers: list[TrainerStatus]) -> Iterator[Finding]:
    ways = ["pulls"] if status.mode != "sync" else ["pushes", "pulls"]  # a push there may wait for room in a queue
    for way in ways:
        measured = {
            (trainer.rank, pserver): (speed, traffic)
            for trainer in trainers
            for pserver, link in trainer.links.items()
            if (speed := _speed(traffic := getattr(link, way))) is not None
        }
        if len(measured) <= 2:
            continue  # of two speeds neither is the usual one
        usual = median(speed for speed, _ in measured.values())
        for (rank, pserver), (speed, traffic) in measured.items():
            lost = (traffic.seconds - traffic.num_bytes / usual) / max(traffic.num_requests, 1)
            if speed < SLOW_SHARE * usual and lost >= MIN_LOST_SECONDS:
                yield Finding(
                    "links", "warning",
                    f"trainer {rank} {way} {speed / 1e6:.0f} MB/s "
                    f"{'to' if way == 'pushes' else 'from'} pserver {pserver}; {usual / 1e6:.0f} MB/s are usual here",
                    "look at the network between these two machines, and at what else runs on them",
                    "in every round all wait for the slowest pair",
                )  # fmt: skip


def _speed(traffic: Traffic) -> float | None:
    """Bytes a second; None if nothing went, or only what is too small to tell."""
    if traffic.num_bytes < MIN_REQUEST_BYTES * max(traffic.num_requests, 1) or not traffic.seconds:
        return None
    return traffic.num_bytes / traffic.seconds


def describe_links(status: ClusterStatus) -> list[dict[str, Any]]:
    """For programs: one member for each pair."""
    return [
        {"trainer": trainer.rank, "pserver": pserver, **link.model_dump()}
        for trainer in status.trainers
        if trainer.state in HERE
        for pserver, link in sorted(trainer.links.items())
    ]


def links_table(status: ClusterStatus) -> Table | None:
    """For people: a line for each trainer, a column for each pserver; None if nobody has measured anything."""
    trainers = [trainer for trainer in status.trainers if trainer.state in HERE and trainer.links]
    if not trainers:
        return None
    pservers = sorted({pserver for trainer in trainers for pserver in trainer.links})
    return Table(
        [Column("from / to"), *(Column(f"pserver {pserver}") for pserver in pservers)],
        [
            (f"trainer {trainer.rank}", *(_cell(trainer.links.get(pserver)) for pserver in pservers))
            for trainer in trainers
        ],
    )


def _cell(link: Link | None) -> str:
    if link is None:
        return "not connected"
    parts = ["Unix socket"] if link.is_local else []
    if link.round_trip_seconds is not None:
        parts.append(f"{link.round_trip_seconds * 1e3:.1f} ms")
    for verb, traffic in (("push", link.pushes), ("pull", link.pulls)):
        if (speed := _speed(traffic)) is not None:
            parts.append(f"{verb} {speed / 1e6:.0f} MB/s")
    if not any("MB/s" in part for part in parts) and link.pushes.num_requests:
        parts.append(f"{link.pushes.num_bytes / link.pushes.num_requests / 1e3:.0f} kB a push: no speed")
    return ", ".join(parts)
