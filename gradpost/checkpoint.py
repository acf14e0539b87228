"""`gradpost checkpoint`: create, list and restore checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ps_config.environment import find_setting
from ps_protocol.errors import NotFound
from ps_protocol.messages import CheckpointCreated
from ps_protocol.vocabulary import Round
from services.runtime.checkpoints import all_checkpoints
from services.runtime.storage import open_checkpoint_storage
from trainer_client.client.inspection import ClusterView

from .output import Column, CommandError, count, print_json, print_line, print_table
from .state_folder import named_root, newest_folder
from .status import asking, print_answer


def default_place() -> str:
    """Return the place that is set, else the one in the state folder, else the one of the newest `up`."""
    return find_setting("checkpoints") or str(_default_folder() / "checkpoints")


def find_state_dir(place_url: str | None) -> Path | None:
    """Return the state folder of the services that write to a place, by default `up`'s; None if it is elsewhere."""
    folder = _default_folder() if place_url is None else Path(place_url).parent
    return folder if (folder / "coordinator.json").exists() else None


def _default_folder() -> Path:
    root = named_root()
    newest = newest_folder(root)
    return root if newest is None or (root / "checkpoints").is_dir() else newest


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
            found = view.checkpoints()
        rows: list[tuple[str, ...]] = [(one.run, f"{one.round:,}", one.place) for one in found]
        columns, where = [Column("run"), Column("round", "right"), Column("place")], "of the run that trains"
    else:
        place_url = place_url or default_place()
        manifests = all_checkpoints(open_checkpoint_storage(place_url), pass_over)
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


def pass_over(run: str, round_: Round, error: Exception) -> None:
    """Print that a checkpoint cannot be read."""
    print_line(f"skipping round {round_:,} of run {run}: {error}")
