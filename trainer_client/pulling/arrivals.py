"""Which parameters of one pull have landed: told by the I/O thread while bytes arrive, waited for by another."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from ps_protocol.vocabulary import Block


class Arrivals:
    """Of one pull. Blocks may land again, with the same bytes, when a reply had broken off."""

    def __init__(self, blocks_of: Mapping[str, Sequence[Block]]) -> None:
        """`blocks_of` are the blocks of each parameter, by its name."""
        self._parameter_of = {block.name: name for name, blocks in blocks_of.items() for block in blocks}
        self._missing = {name: len(blocks) for name, blocks in blocks_of.items()}
        self._landed: set[str] = set()
        self._is_over = False
        self._changed = threading.Condition()

    def landed(self, block: str) -> None:
        """All bytes of this block are where they belong."""
        if block in self._landed:
            return
        self._landed.add(block)
        name = self._parameter_of[block]
        self._missing[name] -= 1
        if not self._missing[name]:
            with self._changed:
                self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will land, whether all has or not."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, name: str) -> bool:
        """Wait until this parameter has landed; False if the pull has ended without."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._missing[name])
        return not self._missing[name]
