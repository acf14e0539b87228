"""`gradpost checkpoint`: create, restore, list and export checkpoints. Only an export imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ps_config.environment import find_setting
from ps_protocol.errors import NotFound, UnsupportedFormat
from ps_protocol.messages import CheckpointCreated
from ps_protocol.routes import CHECKPOINTS
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.checkpoints import Manifest, all_checkpoints, read_shard_file
from services.runtime.logs import configure_logs
from services.runtime.storage import CheckpointStorage, open_checkpoint_storage
from trainer_client.client.inspection import ClusterView

from .output import EXIT_FAILED, CommandError, count, print_json, print_line, print_rows, whole_file
from .runs import asking, named_root, newest_folder, print_answer

if TYPE_CHECKING:
    from torch import Tensor

    from services.pserver.shard.shard_state import ShardState


def default_place() -> str:
    """Return the place that is set, else the one in the state folder, else the one of the newest `up`."""
    root = named_root()
    newest = newest_folder(root)
    folder = root if newest is None or (root / "checkpoints").is_dir() else newest
    return find_setting("checkpoints") or str(folder / "checkpoints")


def create_checkpoint(coordinator: str | None, token_file: Path | None, *, as_json: bool) -> None:
    """Ask the coordinator for a checkpoint, and wait until it is complete."""

    def show(created: CheckpointCreated) -> None:
        print_line(f"checkpoint of round {created.round:,} of run {created.run} in {created.place}")

    print_answer(coordinator, token_file, ClusterView.create_checkpoint, show, as_json=as_json, scope="admin")


def restore_checkpoint(coordinator: str | None, token_file: Path | None, round_: int, *, as_json: bool) -> None:
    """Roll the run that trains back to a complete checkpoint."""

    def roll_back(view: ClusterView) -> dict[str, Any]:
        try:
            return view.roll_back(round_)
        except NotFound as error:
            raise CommandError(f"{error}; gradpost checkpoint list prints the complete ones") from None

    def show(done: dict[str, Any]) -> None:
        print_line(f"run {done['run']} continues from round {done['round']:,} (attempt {done['attempt']})")

    print_answer(coordinator, token_file, roll_back, show, as_json=as_json, scope="admin")


def list_checkpoints(place_url: str | None, coordinator: str | None, token_file: Path | None, *, as_json: bool) -> None:
    """Print the complete checkpoints in a place or of the coordinator's run, newest first.

    Without a place, list those of the coordinator that is given or set, else those of the newest `up`.
    """
    if place_url is None and (coordinator or (find_setting("coordinator") and find_setting("checkpoints") is None)):
        with asking(coordinator, token_file) as view:
            found = view.get(list[CheckpointCreated], CHECKPOINTS)
        rows, where = [dict(one) for one in found], "of the run that trains"
    else:
        place_url = place_url or default_place()
        manifests = all_checkpoints(open_checkpoint_storage(place_url), pass_over)
        found = [CheckpointCreated(run=m.run, round=m.round, place=place_url) for m in manifests]
        rows = [
            {
                "run": manifest.run,
                "round": manifest.round,
                "created": manifest.created,
                "pservers": len(manifest.shards),
                "bytes": sum(shard.num_bytes for shard in manifest.shards),
            }
            for manifest in manifests
        ]
        where = f"in {place_url}"
    if as_json:
        print_json([one.model_dump() for one in found])
    elif rows:
        print_rows(rows)
    else:
        print_line(f"there is no complete checkpoint {where}")


def pass_over(run: str, round_: Round, error: Exception) -> None:
    """Print that a checkpoint cannot be read."""
    print_line(f"skipping round {round_:,} of run {run}: {error}")


def export_model(target: Path, place_url: str | None, run: str | None, round_: int | None) -> None:
    """Write whole tensors, buffers and tied names of a checkpoint, by default the newest, into a safetensors file.

    Unreadable checkpoints are skipped with a line on stdout. Raises CommandError if there is no other.
    """
    configure_logs("export", level="error")
    place = open_checkpoint_storage(place_url or default_place())
    manifests = all_checkpoints(place, pass_over)
    wanted = [one for one in manifests if run in (None, one.run) and round_ in (None, one.round)]
    for manifest in wanted:
        try:
            _write(target, place, manifest)
            return
        except (OSError, UnsupportedFormat) as error:
            pass_over(manifest.run, manifest.round, error)
    what = ("" if round_ is None else f" of round {round_:,}") + ("" if run is None else f" of run {run}")
    others = [f"{one.round:,} of run {one.run}" for one in manifests if one not in wanted]
    there = f"Choose one of rounds {', '.join(others)}" if others else "Give another location with --checkpoints"
    raise CommandError(f"there is no complete checkpoint{what} in {place.url}. {there}", exit_code=EXIT_FAILED)


def read_model(place: CheckpointStorage, manifest: Manifest) -> dict[str, Tensor]:
    """Return tensors by their names in the model's state_dict, in their own dtypes and shapes. Raises DamagedFile."""
    import torch

    from ps_protocol.encodings import TORCH_DTYPES
    from services.pserver.shard.shard_state import ShardState, concatenate

    plan, stored = manifest.plan, dict[str, bytes]()

    def read_shards() -> Iterator[tuple[PserverIndex, ShardState]]:
        for file in manifest.shards:  # one after another, since they may be large
            shard = ShardState.decode(read_shard_file(place, manifest.run, file))[0]
            stored.update(shard.buffers)
            yield file.pserver, shard

    values = concatenate(read_shards(), plan)
    tensors = {name: value.to(TORCH_DTYPES[plan.parameter[name].dtype]) for name, value in values.items()}
    for spec in plan.buffers:
        dtype, data = TORCH_DTYPES[spec.dtype], bytearray(stored[spec.name])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors[spec.name] = flat.reshape(spec.shape)
    # safetensors cannot share storage, so a tied name gets a copy; load_state_dict ties it again.
    return tensors | {alias: tensors[name].clone() for alias, name in manifest.aliases.items()}


def _write(target: Path, place: CheckpointStorage, manifest: Manifest) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, metadata = read_model(place, manifest), {"format": "pt", "run": manifest.run, "round": str(manifest.round)}
    try:
        with whole_file(target) as partial:
            save_file(tensors, partial, metadata)
    except SafetensorError as error:
        raise CommandError(f"{target} cannot be written: {error}", exit_code=EXIT_FAILED) from None
    what = f"{count(len(tensors), 'tensor')} of round {manifest.round:,} of run {manifest.run}"
    print_line(f"{target}: {what}, {count(target.stat().st_size, 'byte')}")
