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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from ..report import HERE, PACKAGES, make_head
from .cases import DDP, GLOO, GROWTH, RAW, RAY, RPC_KEEPING, RPC_TCP, RPC_TCP_KEEPING, Case
from .contestant import SERVER, TRAINER, Repetition
from .systems import OURS
from .work import WIDTH, Work

RESULTS = HERE / "results"
GIGABYTE, MEGABYTE = 1e9, 1e6
ROLES = (SERVER, TRAINER)
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

    def cpu_seconds_a_gigabyte(self, name: str, *roles: str) -> float:
        """Return the CPU-seconds of these roles for each gigabyte that the trainers push and pull."""
        moved = self.works[name].moved_bytes / GIGABYTE
        return statistics.median(done.count_cpu_seconds(*roles) for done in self.figures[name]) / moved

    def cpu_ratio(self, other: str) -> Estimate | None:
        """Return our CPU-seconds a gigabyte over the other's in the same repetition, of servers and trainers.

        None if the other takes less than the resolution of the kernel's figures.
        """
        pairs = zip(self.figures[OURS], self.figures[other], strict=True)
        times = self.works[other].moved_bytes / self.works[OURS].moved_bytes
        seconds = [(ours.count_cpu_seconds(*ROLES), theirs.count_cpu_seconds(*ROLES)) for ours, theirs in pairs]
        return (
            Estimate.of([times * ours / theirs for ours, theirs in seconds])
            if all(theirs for _, theirs in seconds)
            else None
        )

    def busy_cores(self, name: str) -> float:
        """Return the cores of the real machine that were busy."""
        return statistics.median(done.busy_cores for done in self.figures[name])

    def cpu_milliseconds(self, name: str, *roles: str) -> float:
        """Return the CPU-milliseconds of these roles in a round."""
        return 1000 * statistics.median(done.count_cpu_seconds(*roles) for done in self.figures[name])

    def wire_bytes(self, name: str) -> float:
        """Return the bytes that all machines send in a round."""
        return statistics.median(done.wire_bytes for done in self.figures[name])

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
            "cpu_s_per_gb": {role: self.cpu_seconds_a_gigabyte(name, role) for role in ROLES},
            "busy_cores": self.busy_cores(name),
            "contributions_per_s": self.contributions_per_second(name),
            "bytes_per_s": self.bytes_per_second(name),
            "wire_bytes": self.wire_bytes(name),
            "moved_bytes": self.works[name].moved_bytes,
            "cpu_ms": {role: self.cpu_milliseconds(name, role) for role in ROLES},
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
        work = self.works[OURS]
        head = f"## {self.case.name}\n\n{self.case.text}; {work.num_trainers} trainers, {work.num_servers} servers.\n"
        rows = [{"": name, **self._cells(name)} for name in self.figures]
        lines = [f"| {' | '.join(rows[0])} |", "|---|" + "--:|" * (len(rows[0]) - 1)]
        lines += [f"| {' | '.join(row.values())} |" for row in rows]
        return "\n".join([head, *lines]) + "\n"

    def _cells(self, name: str) -> dict[str, str]:
        seconds, computed = self.seconds(name), self.works[name].compute_seconds
        peaks = self.peak_bytes[name]
        cells = {"seconds a round": str(seconds)}
        if computed:
            cells["without computation"] = f"{seconds.median - computed:.3g}"
        if self.works[name].batch:
            cells["rows of a table"] = f"{self.works[name].elements[0] // WIDTH:,}"
            cells["MB of rows and ids"] = f"{self.works[name].moved_bytes / MEGABYTE:.3g}"
            cells["CPU-ms: servers"] = f"{self.cpu_milliseconds(name, SERVER):.3g}"
            cells["CPU-ms: trainers"] = f"{self.cpu_milliseconds(name, TRAINER):.3g}"
        return {
            **cells,
            "99 % within": f"{statistics.median(done.slow_seconds for done in self.figures[name]):.3g}",
            "ours / this": "" if name == OURS else str(self.ratio(name)),
            "MB a second": f"{self.bytes_per_second(name) / MEGABYTE:.0f}",
            "CPU-s a GB: servers": f"{self.cpu_seconds_a_gigabyte(name, SERVER):.2f}",
            "trainers": f"{self.cpu_seconds_a_gigabyte(name, TRAINER):.2f}",
            "together": f"{self.cpu_seconds_a_gigabyte(name, *ROLES):.2f}",
            "CPU, ours / this": "" if name == OURS else str(self.cpu_ratio(name) or ""),
            "busy cores": f"{self.busy_cores(name):.2f}",
            "MB on the wire": f"{self.wire_bytes(name) / MEGABYTE:.3g}",
            "peak MB: a server": f"{max(peaks.get(SERVER, [0])) / MEGABYTE:.0f}",
            "a trainer": f"{max(peaks.get(TRAINER, [0])) / MEGABYTE:.0f}",
        }


@dataclass(frozen=True)
class Target:
    """A limit for the median of our ratio to another system in one case: of seconds, or of CPU-seconds a gigabyte."""

    case: str
    other: str
    limit: float
    is_of_cpu: bool = False
    over_links: bool = False


TARGETS = (
    Target("tiny", RPC_TCP, 1.3),
    Target("latency", RPC_TCP, 1.3),
    Target("resnet50", RPC_TCP, 1.0),
    Target("resnet50", RPC_TCP_KEEPING, 1.0),
    Target("sync_100mb_fp32", RPC_TCP_KEEPING, 1.0),
    Target("sync_100mb_fp32", RAW, 1.5),
    Target("sync_100mb_bf16", GLOO, 1.0),
    Target("tiny", RAY, 1.0),
    Target("sync_100mb_fp32", RPC_TCP_KEEPING, 1.1, is_of_cpu=True),
    Target("resnet50", RPC_TCP_KEEPING, 1.1, is_of_cpu=True),
    Target("tiny", RPC_TCP, 1.1, is_of_cpu=True),
    Target("latency", RPC_TCP, 1.1, is_of_cpu=True),
    Target("sync_100mb_adam", "sync_100mb_fp32", 1.15),
    Target("scale_trainers", "2_trainers", 1.15),
    Target("local_transport", RPC_KEEPING, 1.0),
    Target("embeddings", DDP, 1.0),
    Target("embeddings", DDP, 0.7, over_links=True),  # of 100 Mbit/s
)
MAX_WIRE_RATIO = 1.15  # of bytes on the wire to those of touched rows and their ids


def judge(results: Sequence[CaseResult], *, over_links: bool = False) -> str:
    """Return a table of the targets that were measured."""
    lines = ["| target | at most | measured | |", "|---|--:|--:|---|"]
    by_name = {result.case.name: result for result in results}
    for target in TARGETS:
        result = by_name.get(target.case)
        if (
            result is None
            or target.other not in result.figures
            or (target.over_links != over_links and result.works[OURS].batch)
        ):
            continue
        measured = result.cpu_ratio(target.other) if target.is_of_cpu else result.ratio(target.other)
        name = f"{'CPU-seconds a GB' if target.is_of_cpu else 'seconds'}, {target.case}: ours / {target.other}"
        verdict = "met" if measured.median <= target.limit else "missed"
        lines.append(f"| {name} | {target.limit} | {measured} | {verdict} |")
    for result in results:
        for name in (OURS, *result.variants):
            work = result.works[name]
            slots = 2 if work.optimizer == "adam" else 0
            limit = work.num_bytes / work.num_servers * (2 + slots + work.num_trainers) / MEGABYTE + 64
            peak = result.above_idle_bytes[name] / MEGABYTE
            verdict = "met" if peak <= limit else "missed"
            case = result.case.name if name == OURS else f"{result.case.name}: {name}"
            lines.append(f"| MB of a pserver above idle, {case} | {limit:.0f} | {peak:.0f} | {verdict} |")
            if work.batch:
                ratio = result.wire_bytes(name) / work.moved_bytes
                verdict = "met" if ratio <= MAX_WIRE_RATIO else "missed"
                lines.append(
                    f"| bytes on the wire / of rows and ids, {case} | {MAX_WIRE_RATIO} | {ratio:.3f} | {verdict} |"
                )
    return "\n".join(lines) + "\n"


def publish(results: Sequence[CaseResult], text: str, folder: Path, kind: str = "", where: str = "") -> None:
    """Print the tables, and write `latest.json` and a report with its kind and today's date to the folder."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=HERE).stdout.strip()
    folder.mkdir(exist_ok=True)
    entries = [{**result.to_json(), "commit": commit} for result in results]
    (folder / "latest.json").write_text(json.dumps(entries, indent=2) + "\n")
    head = make_head("Gradpost beside its peers", text, (*PACKAGES, *_installed(*PEER_PACKAGES)), where=where)
    report = "\n".join(
        [head, judge(results, over_links=kind == "_links"), *(result.to_markdown() for result in results)]
    )
    path = folder / f"comparison{kind}_{datetime.date.today():%Y%m%d}.md"
    for result in results:
        if result.case.name == GROWTH and find_spec("matplotlib") is not None:
            plot = path.with_name(f"{path.stem}_{GROWTH}.png")
            draw_growth(result, plot)
            report += f"\n![Milliseconds of a step by rows of a table]({plot.name})\n"
    path.write_text(report)
    print(f"\n{report}\nwritten: {path} and latest.json beside it")


def draw_growth(result: CaseResult, path: Path) -> None:
    """Draw the milliseconds of a step, and of processors in it, by the number of rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="rows of each of two tables", ylabel="milliseconds a step")
    for settings, style in (("none", "-"), ("log", "--")):
        variants = {OURS: result.case.ours, **result.case.variants}
        names = [name for name, one in variants.items() if one.settings.get("durability", "none") == settings]
        names.sort(key=lambda name: result.works[name].elements)
        rows = [result.works[name].elements[0] // WIDTH for name in names]
        curves = {
            "a step": [result.milliseconds(name).median for name in names],
            "processors of the pservers": [result.cpu_milliseconds(name, SERVER) for name in names],
            "processors of the trainers": [result.cpu_milliseconds(name, TRAINER) for name in names],
        }
        for number, (label, values) in enumerate(curves.items()):
            axes.plot(rows, values, style, marker="o", color=f"C{number}", label=f"{label}, durability {settings}")
    touched = [
        result.works[name].moved_bytes / result.works[OURS].moved_bytes * result.milliseconds(OURS).median
        for name in names
    ]
    axes.plot(rows, touched, ":", color="gray", label="a step, if it grew as the touched rows")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _installed(*packages: str) -> list[str]:
    found = []
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            version(package)
            found.append(package)
    return found
