"""A shard that is trained by itself, with a storage beside it, and accidents of its files."""

from __future__ import annotations

import os
from itertools import zip_longest
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.membership import InstallRun, Membership
from ps_protocol.messages import ShardFile
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.vocabulary import Durability, ParameterSpec
from services.pserver.durable.storage import Restored, RunStorage
from services.pserver.durable.update_log import LoggedUpdate, list_segments
from services.pserver.shard.shard import Shard
from services.pserver.shard.shard_state import History
from services.runtime.checkpoints import Manifest, round_folder, write_manifest
from services.runtime.storage import CheckpointStorage, open_checkpoint_storage

from ..oracle import make_numbers, make_options, make_spec

PARAMETERS = [ParameterSpec("a", (130,)), ParameterSpec("b", (7, 9)), ParameterSpec("c", (1,), "BF16")]
GROUPS = [make_options("Adam", amsgrad=True)]
SPEC = make_spec("Adam", GROUPS)


def alter(records: list[bytes], oldest: int, data: st.DataObject) -> tuple[list[bytes], int]:
    """Drop, repeat or swap records from `oldest` on; not all behind it are dropped. Return how many are as before."""
    first = data.draw(st.integers(oldest, len(records) - 2))
    second = data.draw(st.integers(first + 1, len(records) - 1))
    swapped = [*records[:first], records[second], *records[first + 1 : second], records[first], *records[second + 1 :]]
    dropped = [*records[:first], *records[first + 1 :]]
    repeated = [*records[: second + 1], records[first], *records[second + 1 :]]
    altered = data.draw(st.sampled_from([dropped, repeated, swapped]))
    return altered, next(number for number, pair in enumerate(zip_longest(records, altered)) if pair[0] != pair[1])


def plan_for(num_pservers: int, **options: object) -> SlicePlan:
    return make_plan(
        PARAMETERS, num_pservers, min_block_size=20, buffers=(("seen", (3,), "I64"),), optimizer=SPEC,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def install_for(plan: SlicePlan, durability: Durability = "log", run: str = "run1", **changes: object) -> InstallRun:
    values: dict[str, object] = {
        "run": run, "attempt": 0, "plan": plan.as_json, "incarnation": 1, "consistency": Consistency(),
        "nonfinite": "reject", "patience_seconds": 5.0, "durability": durability, "checkpoint_rounds": 4,
        "uploader": 0, "number": 1, "membership": Membership({0: 1}),
    }  # fmt: skip
    return InstallRun.model_validate({**values, **changes})


def gradients(shard: Shard, round_: int) -> dict[str, Tensor]:
    """Return contributions with every parameter in most rounds, and without the second one in every third."""
    result = {}
    for name, place in shard.layout.place.items():
        if round_ % 3 == 0 and place.block.parameter == "b":
            continue
        generator = torch.Generator().manual_seed(1000 * round_ + ord(place.block.parameter))
        values = torch.randn(1000, generator=generator)[place.block.begin : place.block.end]
        result[name] = values.to(torch.bfloat16 if place.dtype == "BF16" else torch.float32)
    return result


def new_shard(plan: SlicePlan, index: int = 0) -> Shard:
    shard = Shard(plan, index)
    for name, place in shard.layout.place.items():
        dtype = torch.bfloat16 if place.dtype == "BF16" else torch.float32
        shard.set_initial({name: torch.arange(place.block.begin, place.block.end).to(dtype) / 64}, {})
    for spec in plan.buffers:
        if spec.pserver == index:
            shard.set_initial({}, {spec.name: bytes(range(24))})
    return shard


def step(shard: Shard, round_: int, storage: RunStorage | None = None) -> None:
    """One round as a run makes it."""
    gradient, present = shard.aggregator.aggregate([gradients(shard, round_)])
    numbers = make_numbers(SPEC, GROUPS)
    if storage is not None and storage.has_log:
        logged = None if len(present) == len(shard.layout.places) else present
        data, num_rows = shard.aggregator.encode(logged)
        storage.log.append(LoggedUpdate(round_, (0,), numbers, logged, rows=num_rows), data)
    shard.apply(gradient, present, numbers)


def open_storage(
    folder: Path, plan: SlicePlan, durability: Durability = "log", index: int = 0, log: Path | None = None
) -> RunStorage:
    return RunStorage(install_for(plan, durability), index, log or folder / f"log-{index}")


def place_in(folder: Path) -> CheckpointStorage:
    return open_checkpoint_storage(str(folder / "checkpoints"))


def digest_after(plan: SlicePlan, round_: int, index: int = 0) -> str:
    """Return the state of a shard that was never interrupted."""
    shard = new_shard(plan, index)
    for number in range(1, round_ + 1):
        step(shard, number)
    return shard.digest()


TWO_SHARDS = plan_for(2)


def train(
    folder: Path, rounds: int, checkpoints: tuple[int, ...] = (4, 8), durability: Durability = "log"
) -> tuple[RunStorage, Shard]:
    """Train the first of two shards, with a checkpoint of its initial values and checkpoints after these rounds."""
    storage, shard = open_storage(folder, TWO_SHARDS, durability), new_shard(TWO_SHARDS)
    play(storage, shard, rounds, (0, *checkpoints))
    return storage, shard


def play(
    storage: RunStorage, shard: Shard, rounds: int, checkpoints: tuple[int, ...], place: CheckpointStorage | None = None
) -> list[ShardFile]:
    """Play these rounds from the first on; return the files of the checkpoints, which are published in a place."""
    files = []
    for round_ in range(rounds + 1):
        if round_:
            step(shard, round_, storage)
        if round_ in checkpoints:
            file, path = storage.snapshot(shard, History({round_: (0,)} if round_ else {}))()
            files.append(file)
            if place is not None:
                place.copy_file(path, f"{round_folder('run1', round_)}/{file.name}")
    return files


def complete_checkpoint(place: CheckpointStorage, plan: SlicePlan, *shards: ShardFile) -> None:
    """Write the manifest of these shards, as the coordinator does."""
    manifest = Manifest(
        run="run1", attempt=0, round=shards[0].round, consistency=Consistency(), plan=plan.as_json, shards=shards,
        created="2026-11-21T10:00:00+00:00",
    )  # fmt: skip
    write_manifest(place, manifest)


def reopen(folder: Path) -> RunStorage:
    return open_storage(folder, TWO_SHARDS)


def assert_restores(folder: Path, round_: int, *, newest: int | None = None, is_short: bool = False) -> Restored:
    restored = reopen(folder).restore(newest)
    assert (restored.round, restored.is_short) == (round_, is_short)
    assert restored.shard.digest() == digest_after(TWO_SHARDS, round_)
    return restored


def segment(folder: Path, base: int) -> Path:
    [path] = (folder / "log-0").glob(f"{base:012}-*.log")
    return path


def snapshot(folder: Path, round_: int) -> Path:
    [path] = (folder / "log-0").glob(f"{round_:012}-*.safetensors")
    return path


def segment_bases(folder: Path) -> list[int]:
    return [segment.base for segment in list_segments(folder / "log-0")]


def flip(path: Path, where: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def refuse(*_: object, **__: object) -> None:
    raise OSError("Input/output error")
