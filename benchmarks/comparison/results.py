"""The figures of all cases as a table, as JSON and as a dated report."""

from __future__ import annotations

import contextlib
import datetime
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from ..report import HERE, PACKAGES, make_head
from .cases import GLOO, RAW, RPC_KEEPING, RPC_TCP, RPC_TCP_KEEPING, Case
from .contestant import SERVER, TRAINER, Repetition
from .systems import OURS
from .work import Work

RESULTS = HERE / "results"
GIGABYTE, MEGABYTE = 1e9, 1e6
PEER_PACKAGES = ("numpy", "ray")  # besides torch


@dataclass(frozen=True)
class Estimate:
    """A median over repetitions and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        median = statistics.median(values)
        if len(set(values)) < 2:
            return cls(median, median, median)
        found = bootstrap(
            (np.asarray(values),), np.median, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        return cls(median, float(found.low), float(found.high))

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class CaseResult:
    """The measurements of one case, by system."""

    case: Case
    works: Mapping[str, Work]
    figures: Mapping[str, Sequence[Repetition]]
    peak_bytes: Mapping[str, Mapping[str, Sequence[int]]]
    above_idle_bytes: Mapping[str, int]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.figures if name in self.case.peers]

    @property
    def variants(self) -> list[str]:
        return [name for name in self.figures if name in self.case.variants]

    def seconds(self, name: str) -> Estimate:
        """Return the seconds of a round."""
        return Estimate.of([done.seconds for done in self.figures[name]])

    def milliseconds(self, name: str) -> Estimate:
        """Return the milliseconds of a round."""
        return Estimate.of([1000 * done.seconds for done in self.figures[name]])

    def ratio(self, other: str) -> Estimate:
        """Return our seconds over the other's in the same repetition, per byte if their works differ in size."""
        pairs = zip(self.figures[OURS], self.figures[other], strict=True)
        times = self.works[other].moved_bytes / self.works[OURS].moved_bytes
        return Estimate.of([times * ours.seconds / theirs.seconds for ours, theirs in pairs])

    def cpu_seconds_a_gigabyte(self, name: str, role: str) -> float:
        """Return the CPU-seconds of a role for each gigabyte that the trainers push and pull."""
        moved = self.works[name].moved_bytes / GIGABYTE
        return statistics.median(done.cpu_seconds.get(role, 0.0) for done in self.figures[name]) / moved

    def contributions_per_second(self, name: str) -> float:
        """Return the contributions of all trainers together."""
        return statistics.median(done.contributions_per_second for done in self.figures[name])

    def bytes_per_second(self, name: str) -> float:
        """Return the float32 bytes that all trainers push and pull."""
        work = self.works[name]
        return self.contributions_per_second(name) * work.moved_bytes / work.num_trainers

    def describe(self, name: str) -> dict[str, Any]:
        seconds, done = self.seconds(name), self.figures[name]
        return {
            "median_s": seconds.median,
            "interval_s": [seconds.low, seconds.high],
            "percentile_99_s": statistics.median(one.slow_seconds for one in done),
            "repetitions_s": [one.seconds for one in done],
            "cpu_s_per_gb": {role: self.cpu_seconds_a_gigabyte(name, role) for role in (SERVER, TRAINER)},
            "contributions_per_s": self.contributions_per_second(name),
            "bytes_per_s": self.bytes_per_second(name),
            "wire_bytes": statistics.median(one.wire_bytes for one in done),
            "peak_bytes": {role: list(peaks) for role, peaks in self.peak_bytes[name].items()},
            "server_peak_above_idle_bytes": self.above_idle_bytes[name],
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "ours": self.describe(OURS),
            "peers": {peer: self.describe(peer) for peer in self.peers},
            "variants": {name: self.describe(name) for name in self.variants},
            **self._ratios_to_json("ratio", self.peers),
            **self._ratios_to_json("variant_ratio", self.variants),
        }

    def _ratios_to_json(self, key: str, others: Sequence[str]) -> dict[str, Any]:
        ratios = {name: self.ratio(name) for name in others}
        return {
            key: {name: ratio.median for name, ratio in ratios.items()},
            f"{key}_interval": {name: [ratio.low, ratio.high] for name, ratio in ratios.items()},
        }

    def to_markdown(self) -> str:
        lines = [
            f"## {self.case.name}",
            "",
            f"{self.case.text}; {self.works[OURS].num_trainers} trainers, {self.works[OURS].num_servers} servers.",
            "",
            "| | seconds a round | 99 % within | ours / this | contributions a second | MB a second "
            "| CPU-s a GB: servers | trainers | MB on the wire | peak MB: a server | a trainer |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for name in self.figures:
            wire = statistics.median(done.wire_bytes for done in self.figures[name]) / MEGABYTE
            peaks = self.peak_bytes[name]
            cells = [
                name,
                str(self.seconds(name)),
                f"{statistics.median(done.slow_seconds for done in self.figures[name]):.3g}",
                "" if name == OURS else str(self.ratio(name)),
                f"{self.contributions_per_second(name):.3g}",
                f"{self.bytes_per_second(name) / MEGABYTE:.0f}",
                *(f"{self.cpu_seconds_a_gigabyte(name, role):.2f}" for role in (SERVER, TRAINER)),
                f"{wire:.3g}",
                *(f"{max(peaks.get(role, [0])) / MEGABYTE:.0f}" for role in (SERVER, TRAINER)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Target:
    """A limit for the median of our ratio to another system in one case, or of a system's milliseconds a round."""

    case: str
    other: str
    limit: float
    stretch: float | None = None
    is_ratio: bool = True


TARGETS = (
    Target("sync_100mb_fp32", RPC_TCP_KEEPING, 0.85, 0.7),
    Target("sync_100mb_fp32", RAW, 1.8, 1.4),
    Target("sync_100mb_bf16", GLOO, 1.0, 0.85),
    Target("resnet50", RPC_TCP, 1.0, 0.8),
    Target("tiny", RPC_TCP, 1.5, 1.0),
    Target("latency", RPC_TCP, 1.5, 1.0),
    Target("many_tensors", OURS, 20.0, 10.0, is_ratio=False),
    Target("many_tensors", "async", 40.0, 20.0, is_ratio=False),
    Target("sync_100mb_adam", "sync_100mb_fp32", 1.15),
    Target("scale_trainers", "2_trainers", 1.15),
    Target("local_transport", RPC_KEEPING, 1.0),
)


def judge(results: Sequence[CaseResult]) -> str:
    """Return a table of the targets that were measured."""
    lines = ["| target | at most | stretch | measured | |", "|---|--:|--:|--:|---|"]
    by_name = {result.case.name: result for result in results}
    for target in TARGETS:
        result = by_name.get(target.case)
        if result is None or target.other not in result.figures:
            continue
        measured = result.ratio(target.other) if target.is_ratio else result.milliseconds(target.other)
        name = f"{target.case} / {target.other}" if target.is_ratio else f"ms a round, {target.case}: {target.other}"
        verdict = "met" if measured.median <= target.limit else "missed"
        stretch = "" if target.stretch is None else f"{target.stretch}"
        lines.append(f"| {name} | {target.limit} | {stretch} | {measured} | {verdict} |")
    for result in results:
        for name in (OURS, *result.variants):
            work = result.works[name]
            slots = 2 if work.optimizer == "adam" else 0
            limit = work.num_bytes / work.num_servers * (2 + slots + work.num_trainers) / MEGABYTE + 64
            peak = result.above_idle_bytes[name] / MEGABYTE
            verdict = "met" if peak <= limit else "missed"
            case = result.case.name if name == OURS else f"{result.case.name}: {name}"
            lines.append(f"| MB of a pserver above idle, {case} | {limit:.0f} | | {peak:.0f} | {verdict} |")
    return "\n".join(lines) + "\n"


def publish(results: Sequence[CaseResult], text: str, folder: Path, *, is_quick: bool) -> None:
    """Print the tables, and write `latest.json` and a report with today's date to the folder."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=HERE).stdout.strip()
    folder.mkdir(exist_ok=True)
    entries = [{**result.to_json(), "commit": commit} for result in results]
    (folder / "latest.json").write_text(json.dumps(entries, indent=2) + "\n")
    summary = text.partition("\n\n")[2].partition("\n\n")[2]
    head = make_head("Gradpost beside its peers", summary.strip(), (*PACKAGES, *_installed(*PEER_PACKAGES)))
    report = "\n".join([head, judge(results), *(result.to_markdown() for result in results)])
    path = folder / f"comparison{'_quick' if is_quick else ''}_{datetime.date.today():%Y%m%d}.md"
    path.write_text(report)
    print(f"\n{report}\nwritten: {path} and latest.json beside it")


def _installed(*packages: str) -> list[str]:
    found = []
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            version(package)
            found.append(package)
    return found
