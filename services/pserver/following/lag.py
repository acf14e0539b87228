"""The lag of a replica: the rounds that its leader has reported and the replica has not applied. Pure."""

from __future__ import annotations

from collections import deque

from ps_protocol.vocabulary import Round

MAX_REPORTS = 1000  # the seconds are counted from the oldest one


class Lag:
    """The reports of a leader that a replica has not reached, and the size of its newest update."""

    def __init__(self) -> None:
        self.round: Round = 0  # of the replica
        self._record_bytes = 0
        self._reports: deque[tuple[Round, float]] = deque()  # later rounds than the replica's, with their times

    def note_leader(self, round_: Round, now: float) -> None:
        """Note the newest round of the leader."""
        if round_ > max(self.round, self._newest) and len(self._reports) < MAX_REPORTS:
            self._reports.append((round_, now))
        elif round_ > max(self.round, self._newest):
            self._reports[-1] = round_, self._reports[-1][1]

    def note_applied(self, round_: Round, num_bytes: int) -> None:
        """Note the newest round of the replica, and the size of its record."""
        self.round, self._record_bytes = round_, num_bytes
        while self._reports and self._reports[0][0] <= round_:
            self._reports.popleft()

    def reset(self, round_: Round) -> None:
        """Begin again with a replica after this round: the reports may be of another attempt."""
        self.round = round_
        self._reports.clear()

    @property
    def _newest(self) -> Round:
        return self._reports[-1][0] if self._reports else 0

    @property
    def rounds(self) -> int:
        """The number of rounds that the replica lacks."""
        return max(0, self._newest - self.round)

    @property
    def num_bytes(self) -> int:
        """The estimated size of the updates that the replica lacks."""
        return self.rounds * self._record_bytes

    def seconds(self, now: float) -> float:
        """Return the time since the leader reported the first round that the replica lacks; 0 if it lacks none."""
        return now - self._reports[0][1] if self._reports else 0.0
