"""The newest output of each trainer, for inspection. It is held in memory only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ps_protocol.errors import NotFound
from ps_protocol.messages import Leave, TrainerHeartbeat
from ps_protocol.process_reports import MAX_KEPT_LINES, TrainerOutput
from ps_protocol.vocabulary import Incarnation, Rank

from .state.run import Run


@dataclass(slots=True)
class _RankOutput:
    """The output of one rank. A later incarnation numbers its lines from 0 again."""

    incarnation: Incarnation = 0
    num_received: int = 0  # lines of this incarnation
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_LINES))
    unfinished: tuple[str, ...] = ()
    traceback: str | None = None


class OutputLog:
    """The output of the trainers of the newest run. A failed trainer's output stays when its rank returns."""

    def __init__(self) -> None:
        self._run = ""
        self._ranks: dict[Rank, _RankOutput] = {}

    def add(self, rank: Rank, message: TrainerHeartbeat | Leave) -> None:
        """Add the lines of a message from a member of the run; lines that were received before are left out."""
        if message.run != self._run:
            self._run = message.run
            self._ranks.clear()
        output = self._ranks.setdefault(rank, _RankOutput())
        if message.incarnation != output.incarnation:
            output.incarnation, output.num_received = message.incarnation, 0
        if (sent := message.output) is not None:
            output.lines.extend(sent.lines[max(0, output.num_received - sent.first) :])
            output.num_received = max(output.num_received, sent.first + len(sent.lines))
            output.unfinished = sent.unfinished
        if isinstance(message, Leave):
            output.traceback = message.traceback

    def describe(self, run: Run, rank: Rank) -> TrainerOutput:
        """Return the output of a rank. Raises NotFound if the run has no such trainer."""
        output = self._ranks.get(rank) if run.record.name == self._run else None
        if output is None and rank not in run.record.trainers:
            raise NotFound(f"run {run.record.name} has no trainer {rank}")
        output = output or _RankOutput()
        lines = (*output.lines, *output.unfinished)
        return TrainerOutput(run=run.record.name, rank=rank, lines=lines, traceback=output.traceback)
