"""Broken services and trainers that a campaign has to detect: `python -m tests.chaos --sabotage …`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Sequence

from ps_config import control_client
from ps_protocol.errors import Ended
from ps_protocol.fence import Fence
from ps_protocol.requests import PushAnswer
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.coordinator import checkpoints, failover
from services.coordinator.failover import FailOver
from services.pserver.durable.records import Buffer
from services.pserver.durable.update_log import LoggedUpdate, UpdateLog
from services.pserver.run.read_pushes import read_blocks
from services.pserver.run.rounds import Rounds
from services.pserver.run.run import Run
from services.pserver.run.standbys import StandbyConfirmations
from services.pserver.shard.bodies import Body
from services.runtime.checkpoints import round_folder
from services.runtime.storage import CheckpointStorage

_push, _append, _required = Run.push, UpdateLog.append, Rounds.required
_delete_others, _read_behind = checkpoints._delete_others, UpdateLog.read_behind

LATE_SECONDS = 0.3  # of each answer to a standby


def break_dedupe() -> None:
    """Apply a repeated push of an applied round again."""

    async def push(self: Run, fence: Fence, body: Body) -> PushAnswer:
        answer = await _push(self, fence, body)
        if answer.status == "already_applied":
            for name, block in read_blocks(body, self.shard.layout).items():
                if block.rows is None:
                    self.shard.block(name).sub_(block.tensor())
        return answer

    Run.push = push  # type: ignore[method-assign]


def break_order() -> None:
    """Open a batch barrier now and then before the last trainer has arrived."""

    def required(self: Rounds[object], round_: Round) -> frozenset[Rank]:
        ranks = _required(self, round_)
        late = ranks - self.batch_barriers
        return ranks - late if round_ == self.open and len(late) == 1 < len(ranks) and round_ % 10 == 0 else ranks

    Rounds.required = required  # type: ignore[method-assign, assignment]


def break_log() -> None:
    """Omit an update from the log now and then."""

    def append(self: UpdateLog, update: LoggedUpdate, gradient: Sequence[Buffer]) -> None:
        if random.random() < 0.8:
            _append(self, update, gradient)

    UpdateLog.append = append  # type: ignore[method-assign]


def break_places() -> None:
    """Delete shards of complete checkpoints."""

    def delete_others(place: CheckpointStorage, run: str, kept: Collection[Round], *, before: Round) -> None:
        _delete_others(place, run, kept, before=before)
        for folder in (round_folder(run, round_) for round_ in kept):
            for name in place.list(folder):
                if name != checkpoints.MANIFEST:
                    place.delete(f"{folder}/{name}")

    checkpoints._delete_others = delete_others


def break_pages() -> None:
    """Let a trainer end at the page of a gateway."""
    control_client.GatewayPage = lambda text, **_: Ended(text)  # type: ignore[misc, assignment]


def break_promotion() -> None:
    """Promote any standby with the run, as if all were in the in-sync set."""

    def suspect(self: FailOver, index: PserverIndex, incarnation: Incarnation) -> None:
        if self._is_to_be_replaced(index, incarnation):
            self._start(index, self._replace_if_silent(index, incarnation))

    FailOver.suspect = suspect  # type: ignore[method-assign]
    FailOver._list_members = lambda self, index: [*self._cluster.registry.find_successors(index).values()]  # type: ignore
    failover.choose_leader = lambda _, num_updates: next(iter(num_updates))


def break_confirmations() -> None:
    """Acknowledge updates that standbys do not hold yet, and send them to standbys late."""

    def read_behind(self: UpdateLog, round_: Round, chain: str | None) -> bytes:
        threading.Event().wait(LATE_SECONDS)
        return _read_behind(self, round_, chain)

    UpdateLog.read_behind = read_behind  # type: ignore[method-assign]
    StandbyConfirmations.find_missing = lambda self, round_: []  # type: ignore[method-assign]


# For each sabotage the faults that reveal it soon.
SABOTAGES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "dedupe": (break_dedupe, ("duplicate requests", "late requests")),
    "order": (break_order, ("trainer hangs while its heartbeats live",)),
    "log": (break_log, ("pserver killed",)),
    "places": (break_places, ("place of one pserver hanging",)),
    "pages": (break_pages, ("proxy answers pages",)),
    "standby": (break_promotion, ("pserver killed after it continued alone",)),
    "early": (break_confirmations, ("pserver and its disk lost",)),
}
NEED_STANDBYS = frozenset({"standby", "early"})
