"""`gradpost checkpoint`: make one, list them, go back to one, and write a model file from one."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ps_protocol.environment import PREFIX, read_settings_file
from ps_protocol.errors import NotFound
from ps_protocol.messages import CheckpointCreated
from ps_protocol.vocabulary import Round
from services.pserver.shard_state import ShardState, concatenate
from services.runtime.checkpoints import Manifest, all_checkpoints, read_shard_file
from services.runtime.places import Place, open_place
from services.runtime.sealed import DamagedFile
from trainer_client.tensors import TORCH_DTYPES

from .output import EXIT_FAILED, Column, CommandError, count, print_json, print_line, print_table
from .status import asking, named_coordinator
from .up.state_folder import named_root, newest_folder


def default_place() -> str:
    """Where checkpoints are if nothing is said: as set, else in the state folder, else in that of the newest `up`."""
    if named := _named_place():
        return named
    root = named_root()
    newest = newest_folder(root)
    folder = root if newest is None or (root / "checkpoints").is_dir() else newest
    return str(folder / "checkpoints")


def _named_place() -> str | None:
    named = os.environ.get(f"{PREFIX}CHECKPOINTS") or read_settings_file(os.environ).get("checkpoints")
    return str(named) if named else None


def create_checkpoint(coordinator: str | None, token_file: Path | None, *, as_json: bool) -> None:
    """Ask the coordinator for a checkpoint, and wait until it is complete."""
    with asking(coordinator, token_file, "admin") as view:
        created = view.create_checkpoint()
    if as_json:
        print_json(created.model_dump())
    else:
        print_line(f"checkpoint of round {created.round:,} of run {created.run} in {created.place}")


def restore_checkpoint(coordinator: str | None, token_file: Path | None, round_: int, *, as_json: bool) -> None:
    """Take everybody back to a complete checkpoint of the run that trains."""
    with asking(coordinator, token_file, "admin") as view:
        try:
            done = view.roll_back(round_)
        except NotFound as error:
            raise CommandError(f"{error}; gradpost checkpoint list says which there are") from None
    if as_json:
        print_json(done)
    else:
        print_line(f"run {done['run']} goes on from round {done['round']:,} (attempt {done['attempt']})")


def list_checkpoints(place_url: str | None, coordinator: str | None, token_file: Path | None, *, as_json: bool) -> None:
    """Print every complete checkpoint, newest first: those in a place, or those of the coordinator's run.

    Without a place the coordinator is asked that is given or set; if none is, it is the place of the newest `up`.
    """
    if place_url is None and (coordinator or (named_coordinator() and _named_place() is None)):
        with asking(coordinator, token_file) as view:
            found = view.checkpoints()
        rows: list[tuple[str, ...]] = [(one.run, f"{one.round:,}", one.place) for one in found]
        columns, where = [Column("run"), Column("round", "right"), Column("place")], "of the run that trains"
    else:
        place_url = place_url or default_place()
        manifests = all_checkpoints(open_place(place_url), _pass_over)
        found = [CheckpointCreated(run=m.run, round=m.round, place=place_url) for m in manifests]
        rows = [
            (m.run, f"{m.round:,}", m.created, str(len(m.shards)), count(sum(s.num_bytes for s in m.shards), "byte"))
            for m in manifests
        ]
        sizes = [Column(title, "right") for title in ("pservers", "size")]
        columns, where = [Column("run"), Column("round", "right"), Column("created"), *sizes], f"in {place_url}"
    if as_json:
        print_json([one.model_dump() for one in found])
    elif rows:
        print_table(columns, rows)
    else:
        print_line(f"there is no complete checkpoint {where}")


def export_model(target: Path, place_url: str, run: str | None, round_: int | None) -> None:
    """Write whole tensors, buffers and tied names of a checkpoint into one safetensors file.

    Without `run` and `round_` it is the newest one; one with damaged files is passed over, and said. Raises
    CommandError if there is none.
    """
    place = open_place(place_url)
    others = []
    for manifest in all_checkpoints(place, _pass_over):
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
            save_file(tensors, target, metadata)
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


def _pass_over(run: str, round_: Round, error: OSError) -> None:
    print_line(f"passing over round {round_:,} of run {run}: {error}")


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
