"""`gradpost plan`: the slice plan of a model, without a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ps_protocol.plan import DEFAULT_MIN_BLOCK_SIZE, DEFAULT_PLACEMENT, SlicePlan, make_plan
from ps_protocol.vocabulary import PARAMETER_DTYPES, ParameterSpec, Placement

from .options import Json
from .output import CommandError, count, print_json, print_line, print_rows

_PARAM = re.compile(r"(?P<name>.+?):(?P<shape>(?:[0-9]+(?:x[0-9]+)*)?)(?::(?P<dtype>[A-Za-z0-9_]+))?", re.DOTALL)


def plan(
    pservers: Annotated[int, typer.Option("--pservers", metavar="M", help="Number of pservers.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE.safetensors", help="The model; only its header is read.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:SHAPE[:DTYPE]", help="A parameter, such as w1:10x1000, s: (a scalar) or e:8x4:BF16."
        ),
    ] = None,
    min_block_size: Annotated[
        int, typer.Option(metavar="N", help="Slice a parameter into at most ceil(elements / N) blocks.")
    ] = DEFAULT_MIN_BLOCK_SIZE,
    placement: Annotated[Placement, typer.Option(help="The placement of blocks on pservers.")] = DEFAULT_PLACEMENT,
    whole: Annotated[bool, typer.Option("--whole", help="Keep each parameter whole, on one pserver.")] = False,
    as_json: Json = False,
) -> None:
    """Show the slice plan of a model: its blocks, and the bytes on each pserver.

    Parameters are planned in the order of the file's data, then of the --param options. A trainer uses the model's
    order, which a safetensors file does not keep: with round_robin, and for equal sizes with balanced, its placement
    may differ. The digest is that of a plan without an optimizer.

    Tensors of other dtypes than F32, BF16 and F16 count as buffers, which are not sliced. A file does not distinguish
    float buffers (running means) from parameters, so they are planned as parameters.
    """
    if file is None and not param:
        raise CommandError("there is nothing to plan: give a safetensors file, --param NAME:SHAPE or both")
    tensors = [] if file is None else read_tensors(file)
    parameters = [ParameterSpec(*tensor) for tensor in tensors if tensor[2] in PARAMETER_DTYPES]
    buffers = [tensor for tensor in tensors if tensor[2] not in PARAMETER_DTYPES]
    made = make_plan(
        [*parameters, *map(parse_param, param or [])],
        pservers,
        min_block_size=min_block_size,
        placement=placement,
        slice_parameters=not whole,
        buffers=buffers,
    )
    if as_json:
        print_json(plan_to_json(made))
    else:
        _print_tables(made)


def parse_param(text: str) -> ParameterSpec:
    """Parse `NAME:SHAPE[:DTYPE]`; raises CommandError.

    >>> parse_param("w1:10x1000")
    ParameterSpec(name='w1', shape=(10, 1000), dtype='F32', group=0, is_sparse=False)
    >>> parse_param("scale::BF16").shape
    ()
    """
    match = _PARAM.fullmatch(text)
    if match is None:
        raise CommandError(f"--param {text:.200} is not NAME:SHAPE[:DTYPE], as w1:10x1000, s: (a scalar) or e:8x4:BF16")
    name, shape, dtype = match.group("name", "shape", "dtype")
    sizes = shape.split("x") if shape else []
    if any(len(size) > 18 for size in sizes):
        raise CommandError(f"--param {text:.200} is too large")
    return ParameterSpec(name, tuple(map(int, sizes)), dtype or "F32")


def read_tensors(path: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and dtype of the tensors in a safetensors file, in the order of their data.

    Raises CommandError if the file cannot be read, is not a safetensors file, or is truncated.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return [(name, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()]
    except (OSError, SafetensorError) as error:
        raise CommandError(f"cannot read {path}: {error}") from None


def held_bytes(plan: SlicePlan) -> list[int]:
    """Return the bytes of parameters and buffers on each pserver."""
    held = [plan.shard_bytes(pserver) for pserver in range(plan.num_pservers)]
    for buffer in plan.buffers:
        held[buffer.pserver] += buffer.num_bytes
    return held


def plan_to_json(plan: SlicePlan) -> dict[str, Any]:
    """Return the document that `--json` prints; `share` is a fraction of all bytes."""
    held = held_bytes(plan)
    total = max(sum(held), 1)
    return {
        "digest": plan.digest,
        "blocks": [
            {"name": block.name, "begin": block.begin, "end": block.end, "pserver": block.pserver}
            for block in plan.blocks
        ],
        "pservers": [
            {"pserver": pserver, "bytes": num_bytes, "share": num_bytes / total}
            for pserver, num_bytes in enumerate(held)
        ],
    }


def _print_tables(plan: SlicePlan) -> None:
    print_rows(
        [
            {"block": b.name, "begin": b.begin, "end": b.end, "bytes": plan.block_bytes(b), "pserver": b.pserver}
            for b in plan.blocks
        ]
    )
    print_rows([{"buffer": b.name, "dtype": b.dtype, "bytes": b.num_bytes, "pserver": b.pserver} for b in plan.buffers])
    held = held_bytes(plan)
    mean = max(sum(held), 1) / plan.num_pservers
    print_rows(
        [
            {
                "pserver": pserver,
                "blocks": len(plan.shards[pserver]),
                "bytes": num_bytes,
                "of the mean": num_bytes / mean,
            }
            for pserver, num_bytes in enumerate(held)
        ]
    )
    print_line(
        f"{count(len(plan.parameters), 'parameter')}, {count(len(plan.blocks), 'block')}, "
        f"{count(sum(held), 'byte')} on {count(plan.num_pservers, 'pserver')}"
    )
    print_line(f"digest {plan.digest}")
