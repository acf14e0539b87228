"""Looking at one block just before and just after its next update, for whoever asks how large that was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ps_protocol.vocabulary import Round


@dataclass(frozen=True, slots=True)
class Stepped:
    """Copies of one block's values, of shape (num_elements,), float32; `version` is that after the update."""

    version: Round
    before: Tensor
    after: Tensor


@dataclass(slots=True)
class _Probe:
    waiter: asyncio.Future[Stepped]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def tell(self, stepped: Stepped) -> None:
        if not self.waiter.done():
            self.waiter.set_result(stepped)


class Probes:
    """One for each block at most, shared by all who ask meanwhile. `take` is called on the compute thread."""

    def __init__(self) -> None:
        self._wanted: dict[str, _Probe] = {}

    async def wait_for_step(self, name: str, seconds: float) -> Stepped | None:
        """The block's next update; None if there is none for so long. Called on the event loop."""
        probe = self._wanted.get(name)
        if probe is None:
            probe = self._wanted[name] = _Probe(asyncio.get_running_loop().create_future())
        try:
            return await asyncio.wait_for(asyncio.shield(probe.waiter), seconds)
        except TimeoutError:
            return None

    def take(self, present: Iterable[str], block: Callable[[str], Tensor]) -> list[tuple[str, _Probe, Tensor]]:
        """Before an update of these blocks: those that somebody looks at, and copies of their values."""
        if not self._wanted:
            return []
        probes = ((name, self._wanted.pop(name, None)) for name in present)
        return [(name, probe, block(name).clone()) for name, probe in probes if probe is not None]

    def tell(self, taken: list[tuple[str, _Probe, Tensor]], block: Callable[[str], Tensor], version: Round) -> None:
        """After it."""
        for name, probe, before in taken:
            probe.loop.call_soon_threadsafe(probe.tell, Stepped(version, before, block(name).clone()))
