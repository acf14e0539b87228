"""`gradpost checkpoint export`: a model file from a checkpoint. Apart, since it needs torch and takes its time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from services.pserver.shard_state import ShardState, concatenate
from services.runtime.checkpoints import Manifest, all_checkpoints, read_shard_file
from services.runtime.places import Place, open_place
from services.runtime.sealed import DamagedFile
from trainer_client.tensors import TORCH_DTYPES

from .checkpoint import pass_over
from .output import EXIT_FAILED, CommandError, count, print_line
from .whole_file import whole_file


def export_model(target: Path, place_url: str, run: str | None, round_: int | None) -> None:
    """Write whole tensors, buffers and tied names of a checkpoint into one safetensors file.

    Without `run` and `round_` it is the newest one; one with damaged files is passed over, and said. Raises
    CommandError if there is none.
    """
    place = open_place(place_url)
    others = []
    for manifest in all_checkpoints(place, pass_over):
        if run not in (None, manifest.run) or round_ not in (None, manifest.round):
            others.append(f"{manifest.round:,} of run {manifest.run}")
            continue
        try:
            tensors = read_model(place, manifest)
        except DamagedFile as error:
            print_line(f"passing over round {manifest.round:,}: {error}")
            continue
        metadata = {"format": "pt", "run": manifest.run, "round": str(manifest.round)}
        try:
            with whole_file(target) as partial:
                save_file(tensors, partial, metadata)
        except SafetensorError as error:
            raise CommandError(f"{target} cannot be written: {error}", exit_code=EXIT_FAILED) from None
        print_line(
            f"{target}: {count(len(tensors), 'tensor')} of round {manifest.round:,} of run {manifest.run}, "
            f"{count(target.stat().st_size, 'byte')}"
        )
        return
    wanted = ("" if round_ is None else f" of round {round_:,}") + ("" if run is None else f" of run {run}")
    there = f"there are those of rounds {', '.join(others)}" if others else "where else, is --checkpoints"
    raise CommandError(f"there is no complete checkpoint{wanted} in {place.url}; {there}", exit_code=EXIT_FAILED)


def read_model(place: Place, manifest: Manifest) -> dict[str, Tensor]:
    """Tensors by the names of the model's state_dict, in their own dtypes and shapes. Raises DamagedFile."""
    plan = manifest.slice_plan()
    shards = [
        (file.pserver, ShardState.decode(read_shard_file(place, manifest.run, file))[0]) for file in manifest.shards
    ]
    values = concatenate(shards, plan)
    tensors = {name: value.to(TORCH_DTYPES[plan.parameter[name].dtype]) for name, value in values.items()}
    stored = {name: data for _, shard in shards for name, data in shard.buffers.items()}
    for spec in plan.buffers:
        dtype = TORCH_DTYPES[spec.dtype]
        flat = (
            torch.frombuffer(bytearray(stored[spec.name]), dtype=dtype)
            if spec.num_bytes
            else torch.empty(0, dtype=dtype)
        )
        tensors[spec.name] = flat.reshape(spec.shape)
    # A file holds no tensor twice, so that a tied name gets a copy; load_state_dict ties it again.
    return tensors | {alias: tensors[name].clone() for alias, name in manifest.aliases.items()}
