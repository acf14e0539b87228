"""`gradpost params`: the parameters of a live run as a list, statistics, or a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import safe_open

from trainer_client.client.inspection import ClusterView

from .output import Column, CommandError, count, print_line, print_table, whole_file
from .status import asking, print_answer

MAX_BAR = 50


def show_parameters(
    coordinator: str | None, token_file: Path | None, name: str | None, output: Path | None, *, as_json: bool
) -> None:
    """Print a list of all parameters or the statistics of one; or write one or all to a file."""
    if output is not None:
        with asking(coordinator, token_file) as view:
            _write(output, view, name)
    elif name is None:
        print_answer(coordinator, token_file, ClusterView.parameters, _print_list, as_json=as_json)
    else:
        print_answer(coordinator, token_file, lambda view: view.statistics(name), _print_statistics, as_json=as_json)


def _write(output: Path, view: ClusterView, name: str | None) -> None:
    if output.suffix != ".safetensors":
        raise CommandError(f"--output must end in .safetensors, which is the format; not {output.name!r}")
    with whole_file(output) as partial, partial.open("wb") as file:
        for piece in view.model(name):
            file.write(piece)
    with safe_open(output, framework="np") as model:
        num_tensors, metadata = len(model.keys()), model.metadata()
    print_line(
        f"{output}: {count(num_tensors, 'tensor')} of round {int(metadata['round']):,} of run {metadata['run']}, "
        f"{count(output.stat().st_size, 'byte')}"
    )


def _print_list(listed: dict[str, Any]) -> None:
    parameters = listed["parameters"]
    print_line(f"run {listed['run']}, round {listed['version']:,}: {count(len(parameters), 'parameter')}")
    print_line()
    print_table(
        [Column("parameter"), Column("shape"), Column("dtype"), Column("bytes", "right"), Column("on pservers")],
        [
            (
                one["name"],
                "x".join(map(str, one["shape"])) or "scalar",
                one["dtype"],
                f"{one['bytes']:,}",
                ", ".join(map(str, sorted({block["pserver"] for block in one["blocks"]}))),
            )
            for one in parameters
        ],
    )


def _print_statistics(found: dict[str, Any]) -> None:
    shape = "x".join(map(str, found["shape"])) or "scalar"
    print_line(f"{found['name']}  {shape}  round {found['version']:,} of run {found['run']}")
    for label, key in (
        ("norm", "norm"),
        ("mean", "mean"),
        ("deviation", "deviation"),
        ("minimum", "minimum"),
        ("maximum", "maximum"),
        ("newest update / values", "update_ratio"),
    ):
        value, missing = found[key], "none, as it is frozen" if found["is_frozen"] else "unknown"
        print_line(f"  {label:24}{missing if value is None else f'{value:.6g}'}")
    for label, key in (("NaN", "num_nan"), ("infinite", "num_infinite"), ("zero", "num_zero")):
        if found[key]:
            print_line(f"  {label:24}{found[key]:,} of {found['num_elements']:,}")
    print_line(f"{'from':>9} {'values':>9}")
    for line in draw_histogram(found["histogram"]):
        print_line(line)


def draw_histogram(bins: list[tuple[float, float, int]]) -> list[str]:
    """Return at most twenty lines, each for one bin or for several neighbours.

    >>> for line in draw_histogram([(-0.5, -0.25, 1), (0, 0, 2), (0.25, 0.5, 1000)]): print(line)
         -0.5         1  #
            0         2  #
         0.25     1,000  ##################################################
    """
    group_size = max(1, math.ceil(len(bins) / 20))
    groups = [bins[i : i + group_size] for i in range(0, len(bins), group_size)]
    sums = [sum(number for _, _, number in group) for group in groups]
    lines = []
    for group, number in zip(groups, sums, strict=True):
        bar = "#" * math.ceil(MAX_BAR * number / max(sums))
        lines.append(f"{group[0][0]:>9.4g} {number:>9,}  {bar}")
    return lines
