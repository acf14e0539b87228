"""The replay of a logged update, with the same bits as the first time."""

from __future__ import annotations

import torch

from ..shard.compensation import compensate_all, step_stale
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
    pulled = None
    if update.dc_lambda is not None:
        data, pulled = data[: len(data) // 2], data[len(data) // 2 :]
    gradient = shard.aggregator.decode(data, update.present)
    if update.origin is None:
        shard.apply(gradient, present, update.hyper_parameters, loaded)
        history.add_round(update.round, update.ranks, update.nonfinite, update.norm, update.hyper_parameters, keep=keep)
        return
    if loaded is not None:
        shard.load_slots(loaded)
    gradients = dict(zip(present, shard.layout.view_blocks(gradient, present), strict=True))
    if pulled:
        assert update.dc_lambda is not None
        compensate_all(shard, gradients, torch.frombuffer(pulled, dtype=torch.float32), update.dc_lambda)
    step_stale(shard, gradients, update.hyper_parameters, update.counter, update.pulled)
    shard.version = update.round
    history.steps[update.ranks[0]] = update.origin
