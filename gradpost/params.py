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
FORMATS = {".npy": "npy", ".json": "json", ".safetensors": "safetensors"}


def show_parameters(
    coordinator: str | None, token_file: Path | None, name: str | None, output: Path | None, *, as_json: bool
) -> None:
    """Print a list of all parameters or the statistics of one; or write one or all to a file."""
    if output is not None:
        with asking(coordinator, token_file) as view:
            _write_model(output, view) if name is None else _write(output, view.parameter(name, _format_of(output)))
    elif name is None:
        print_answer(coordinator, token_file, ClusterView.parameters, _print_list, as_json=as_json)
    else:
        print_answer(coordinator, token_file, lambda view: view.statistics(name), _print_statistics, as_json=as_json)


def _format_of(output: Path) -> str:
    if output.suffix not in FORMATS:
        raise CommandError(f"--output must end in {', '.join(FORMATS)}, which selects the format; not {output.name!r}")
    return FORMATS[output.suffix]


def _write(output: Path, data: bytes) -> None:
    with whole_file(output) as partial:
        partial.write_bytes(data)
    print_line(f"{output}: {count(len(data), 'byte')}")


def _write_model(output: Path, view: ClusterView) -> None:
    if output.suffix != ".safetensors":
        raise CommandError(
            f"a whole model must be written as FILE.safetensors, not {output.name!r}. Otherwise name a parameter"
        )
    with whole_file(output) as partial, partial.open("wb") as file:
        for piece in view.model():
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
        value = found[key]
        print_line(f"  {label:24}{'unknown' if value is None else f'{value:.6g}'}")
    for label, key in (("NaN", "num_nan"), ("infinite", "num_infinite"), ("zero", "num_zero")):
        if found[key]:
            print_line(f"  {label:24}{found[key]:,} of {found['num_elements']:,}")
    print_line(f"{'from':>9} {'values':>9}")
    for line in draw_histogram(found["histogram"]):
        print_line(line)


def draw_histogram(histogram: dict[str, Any]) -> list[str]:
    """Return at most twenty lines, each for one bin or for several neighbours.

    >>> for line in draw_histogram({"begin": -0.5, "width": 0.25, "counts": [1, 0, 1000]}): print(line)
         -0.5         1  #
        -0.25         0
            0     1,000  ##################################################
    """
    counts, begin, width = histogram["counts"], histogram["begin"], histogram["width"]
    group_size = max(1, math.ceil(len(counts) / 20))
    sums = [sum(counts[i : i + group_size]) for i in range(0, len(counts), group_size)]
    most = max(sums, default=0)
    lines = []
    for i, number in enumerate(sums):
        bar = "#" * (math.ceil(MAX_BAR * number / most) if most else 0)
        edge = f"{begin + i * group_size * width:.4g}"
        lines.append(f"{edge:>9} {number:>9,}  {bar}".rstrip())
    return lines
