"""The replay of a logged update, with the same bits as the first time."""

from __future__ import annotations

from ..shard.history import History
from ..shard.optimizer_blocks import LoadedState
from ..shard.shard import Shard
from .update_log import LoggedUpdate


def replay_update(shard: Shard, history: History, update: LoggedUpdate, data: memoryview, *, keep: int) -> None:
    """Apply a logged update, and the state logged with it. The history keeps the newest `keep` rounds."""
    present = tuple(place.name for place in shard.layout.places) if update.present is None else update.present
    loaded = None
    if update.loaded is not None:
        loaded, data = LoadedState.from_log(update.loaded, data, shard.layout)
    shard.apply(shard.aggregator.decode(data, update.present), present, update.hyper_parameters, loaded)
    history.add_round(update.round, update.ranks, update.nonfinite, update.norm, keep=keep)
