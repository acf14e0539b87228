"""Slots that a script has loaded, until they are in the run: they go with the trainer's next step."""

from __future__ import annotations

from ps_protocol.vocabulary import Round

from ..client import ParameterClient
from .slot_state import Slots
from .slot_transfer import SlotFrames, make_slot_frames


class Loading:
    """Of one trainer. Nothing here blocks.

    Before the first round nobody but the trainer that brings the initial values pushes them: all others would bring the
    same.
    """

    def __init__(self, client: ParameterClient) -> None:
        self.slots: Slots | None = None  # those that no round has taken yet
        self._client = client
        self._after: Round = -1  # the round after which the newest ones were loaded; -1: none ever were
        self._frames: list[SlotFrames] = []
        self._has_stepped = False  # in this life of the trainer

    def load(self, slots: Slots, begun: Round) -> None:
        """Push these with the step after `begun`, instead of any that were loaded before and have not left."""
        # Later it may be gone; of those that come with a round the lowest rank's count.
        is_alone = begun == 0 or self._client.joined.consistency.is_async
        if is_alone and self._client.uploader != self._client.joined.rank:
            return
        if not self._has_stepped and self._client.start > 1:
            self._client.log.info(f"the run is at round {begun} and has slots of its own: those loaded are left out")
            return
        if begun == 0 and not slots:  # there is nothing that they could replace
            self.slots = None
            return
        self.slots, self._after, self._frames = slots, begun, []

    def frames_for(self, step: Round) -> list[SlotFrames] | None:
        """What goes to each pserver with this step, if anything does."""
        self._has_stepped = True
        if self.slots is None or step > self._after + 1:
            return None
        if not self._frames:
            size = self._client.settings.chosen_bucket_bytes
            self._frames = make_slot_frames(self._client.plan, self.slots, bucket_bytes=size)
        return self._frames

    def landed(self, version: Round) -> None:
        """This version was pulled."""
        if version > self._after:
            self.slots, self._frames = None, []

    def went_back(self, version: Round) -> None:
        """The run begins, or goes on, after this version."""
        if version > self._after:  # they are in it
            self.slots, self._frames = None, []
        is_lost = version < self._after or (version == self._after and self.slots is None)
        if self._after >= 0 and is_lost:
            self.slots, self._frames, self._after = None, [], -1
            self._client.log.warning("the slots that this script has loaded are lost with the steps after them")
