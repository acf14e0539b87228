"""Make tables and plots of the study's results: `python benchmarks/consistency/report.py`.

The tables replace those between the markers of the report; plots and runs.csv are written to the folder beside it.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen
import matplotlib.pyplot as plt
from cells import ASYNC, AVERAGED, DELAYED, FOR_EVER, LOCAL, LONG, MODES, QUESTIONS, SHORT, SLOWED, STALE, SYNC, Mode
from results import TARGETS, Run, read_runs

REPORT = Path(__file__).parents[1] / "results" / "consistency_2core_epyc_202611.md"
PLOTS = REPORT.with_suffix("")
SUMMARY = PLOTS / "runs.csv"

Runs = dict[str, list[Run]]
Column = tuple[str, Callable[[Run], float], str]
SECONDS: Column = ("seconds to target", lambda run: run.seconds_to_target, "{:.1f}")
STEPS: Column = ("steps to target", lambda run: run.steps_to_target, "{:.0f}")
LOSS: Column = ("final loss", lambda run: run.final_loss, "{:.3f}")
PACE: Column = ("contributions/s", lambda run: run.contributions_a_second, "{:.2f}")
IDLE: Column = ("idle, %", lambda run: 100 * run.idle_share, "{:.1f}")
BYTES: Column = ("kB a step", lambda run: run.kilobytes_a_step, "{:.1f}")


def names(modes: Iterable[Mode], prefix: str = "") -> list[str]:
    """Return the names of the cells of these modes."""
    return [prefix + name for name, *_ in modes]


def spread(values: Iterable[float], form: str) -> str:
    """Return `median (lowest to highest)`, or one number if they print the same."""
    ordered = sorted(values)
    shown = [form.format(value) for value in (statistics.median(ordered), ordered[0], ordered[-1])]
    middle, low, high = ("never" if text == "inf" else text for text in shown)
    return middle if low == high else f"{middle} ({low} to {high})"


def table(runs: Runs, rows: Sequence[str], columns: Sequence[Column]) -> str:
    """Return a Markdown table with a row for each cell."""
    lines = ["| run | " + " | ".join(title for title, _, _ in columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name in rows:
        cells = [spread(map(value, runs[name]), form) for _, value, form in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def against_sync(runs: Runs, word: str, modes: Sequence[Mode]) -> str:
    """Return a table of pace and idle time, with the ratio to the synchronous mode of the same seed."""
    sync = runs[f"sync, {word}"]
    lines = [f"| run, {word} slowness | contributions/s | times sync | idle, % |", "|---|---|---|---|"]
    for name, *_ in modes:
        rows = runs[f"{name}, {word}"]
        ratios = [run.contributions_a_second / s.contributions_a_second for run, s in zip(rows, sync, strict=True)]
        cells = [spread(map(value, rows), form) for _, value, form in (PACE, IDLE)]
        lines.append(f"| {name} | {cells[0]} | {spread(ratios, '{:.2f}')} | {cells[1]} |")
    return "\n".join(lines)


def write_runs(runs: Runs) -> None:
    """Write one line for each run, so that the tables can be checked without training again."""
    columns = (SECONDS, STEPS, LOSS, PACE, IDLE, BYTES)
    with SUMMARY.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "seed", *(title for title, _, _ in columns)])
        for name, seeds in sorted(runs.items()):
            for run in seeds:
                writer.writerow([name, run.seed, *(f"{value(run):.4g}" for _, value, _ in columns)])


def plot_losses(runs: Runs, shown: Sequence[str], file: str) -> None:
    """Plot each seed's held-out loss over steps and over seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for ax, over in zip(axes, ("steps", "seconds"), strict=True):
        for color, name in enumerate(shown):
            for number, run in enumerate(runs[name]):
                ax.plot(*run.curve(over), color=f"C{color}", alpha=0.7, lw=1.2, label=None if number else name)
        ax.axhline(TARGETS[runs[shown[0]][0].workload], color="grey", lw=0.8, ls=":")
        ax.set(xlabel="steps of trainer 0" if over == "steps" else "seconds", yscale="log")
        ax.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("held-out loss")
    axes[1].legend()
    save(figure, file)


def plot_slowness(runs: Runs) -> None:
    """Plot idle time and pace over the staleness bound, as figure 13 of OSDI'14."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    slowed = names(SLOWED)
    for offset, word, modes in ((-0.2, "transient", SLOWED), (0.2, "persistent", FOR_EVER)):
        places = [slowed.index(name) + offset for name, *_ in modes]
        for ax, (_, value, _) in zip(axes, (IDLE, PACE), strict=True):
            seeds = [[value(run) for run in runs[f"{name}, {word}"]] for name, *_ in modes]
            middles = [statistics.median(values) for values in seeds]
            errors = [[m - min(v) for m, v in zip(middles, seeds, strict=True)],
                      [max(v) - m for m, v in zip(middles, seeds, strict=True)]]  # fmt: skip
            ax.bar(places, middles, 0.38, yerr=errors, capsize=2, label=word)
    for ax, label in zip(axes, ("idle, % of the trainers' time", "contributions a second"), strict=True):
        ax.set_xticks(range(len(slowed)), slowed)
        ax.set_ylabel(label)
        ax.grid(alpha=0.3, axis="y")
    axes[1].legend(title="slowness")
    save(figure, "slowness.png")


def save(figure: plt.Figure, file: str) -> None:
    figure.tight_layout()
    figure.savefig(PLOTS / file, dpi=100)
    plt.close(figure)


def write_report() -> None:
    """Replace the tables of the report and all plots."""
    runs = read_runs()
    tables = {
        "modes": table(runs, names(MODES), (SECONDS, STEPS, LOSS, IDLE, BYTES)),
        "questions": table(runs, names([ASYNC, *QUESTIONS]), (SECONDS, LOSS, PACE, IDLE, BYTES)),
        "large": table(runs, names([ASYNC, *QUESTIONS], "large, "), (PACE,)),
        "characters": table(runs, names([*LONG, *SHORT], "characters, "), (SECONDS, STEPS, LOSS, IDLE, BYTES)),
        "transient": against_sync(runs, "transient", SLOWED),
        "persistent": against_sync(runs, "persistent", FOR_EVER),
    }
    report = REPORT.read_text()
    for name, text in tables.items():
        mark, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        begin = report.index(mark) + len(mark)
        report = report[:begin] + text + "\n" + report[report.index(end, begin) :]
    REPORT.write_text(report)
    write_runs(runs)
    PLOTS.mkdir(exist_ok=True)
    plot_losses(runs, names([SYNC, ASYNC, *STALE]), "staleness.png")
    plot_losses(runs, names([SYNC, *DELAYED]), "delay.png")
    plot_losses(runs, names([SYNC, *LOCAL, AVERAGED]), "local-steps.png")
    plot_losses(runs, names([*LONG, *SHORT], "characters, "), "characters.png")
    plot_slowness(runs)


if __name__ == "__main__":
    write_report()
