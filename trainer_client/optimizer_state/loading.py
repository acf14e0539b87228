"""Loaded optimizer state and values, until the trainer's next step brings them to the pservers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ps_protocol.vocabulary import Round

from ..client import RunClient
from .torch_state import OptimizerState, split_masters
from .transfer import StateFrames, make_state_frames


class Loading:
    """Optimizer state and values that one trainer has loaded. No method blocks.

    Before the first round only the trainer that brings the initial values pushes them.
    """

    def __init__(self, client: RunClient, parameters: Mapping[str, Tensor]) -> None:
        """`parameters` are those of the script, which has its values in them by the next step."""
        self._parameters = parameters
        self.slots: OptimizerState | None = None  # those that no round has taken yet
        self._masters: Mapping[str, Tensor] = {}  # the same of values, by parameter
        self._client = client
        self._after: Round = -1  # the round after which the newest ones were loaded; -1: none ever were
        self._frames: list[StateFrames] = []
        self._has_stepped = False  # in this life of the trainer

    def load(self, slots: OptimizerState, begun: Round) -> None:
        """Push this state with the step after `begun`, in place of earlier state that has not left."""
        if not self._is_pushed_here(begun):
            return
        if self._belongs_to_run(begun):
            self._client.log.info(f"the run is at round {begun} and has slots of its own: those loaded are left out")
            return
        if begun == 0 and not slots:  # there is nothing that they could replace
            self.slots = None
            return
        self._begin(begun)
        self.slots = slots

    def load_masters(self, values: Mapping[str, Tensor], begun: Round) -> None:
        """Push these values of parameters, (numel,) float32, with the step after `begun`."""
        if self._belongs_to_run(begun):
            self._client.log.warning(
                f"the run is at round {begun} and has parameters of its own: the values that this script has loaded "
                "are left out, and training goes on from those of the run. Load a checkpoint only where "
                "optimizer.round is 0"
            )
            return
        if self._is_pushed_here(begun):
            self._begin(begun)
            self._masters = {**self._masters, **values}

    def _is_pushed_here(self, begun: Round) -> bool:
        # Later the trainer of the initial values may be gone; of those that come with a round the lowest rank's count.
        is_alone = begun == 0 or self._client.joined.consistency.is_async
        return not is_alone or self._client.uploader == self._client.joined.rank

    def _belongs_to_run(self, begun: Round) -> bool:
        return not self._has_stepped and begun > 0

    def _begin(self, begun: Round) -> None:
        if self._after != begun:  # what was loaded before has left
            self._forget()
        self._after, self._frames = begun, []

    def frames_for(self, step: Round) -> list[StateFrames] | None:
        """Return the frames for each pserver that belong to this step; None if there are none."""
        self._has_stepped = True
        if (self.slots is None and not self._masters) or step > self._after + 1:
            return None
        if not self._frames:
            slots, masters = self.slots, self._masters
            if slots is not None:  # whose masters are more exact than the values that were loaded with them
                slots, exact = split_masters(slots, self._parameters)
                masters = {**masters, **exact}
            size = self._client.settings.chosen_bucket_bytes
            self._frames = make_state_frames(self._client.plan, slots, masters, bucket_bytes=size)
        return self._frames

    def note_pulled(self, version: Round) -> None:
        """Forget the loaded state if this version, which was pulled, contains it."""
        if version > self._after:
            self._forget()

    def note_rollback(self, version: Round) -> None:
        """Forget the loaded state if it is in this version, after which the run goes on, or was lost."""
        is_taken = self.slots is None and not self._masters
        is_lost = version < self._after or (version == self._after and is_taken)
        if version > self._after:  # they are in it
            self._forget()
        if self._after >= 0 and is_lost:
            self._forget()
            self._after = -1
            self._client.log.warning("what this script has loaded is lost with the steps after it")

    def _forget(self) -> None:
        self.slots, self._masters, self._frames = None, {}, []
