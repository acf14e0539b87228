"""The frame of one version, which many trainers read at once; and what it is made of, if that is lent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from ps_protocol.errors import StaleRound
from ps_protocol.frames import encode_header
from ps_protocol.routes import SINCE_KEY
from ps_protocol.vocabulary import Round
from ps_protocol.wire_types import WireTensor

LARGE_BYTES = 1 << 16  # what is sent as it lies; smaller pieces are joined

Parts: TypeAlias = Sequence[bytes | memoryview]
Tensor: TypeAlias = tuple[WireTensor, bytes | memoryview]
NOTHING: Mapping[str, Sequence[Tensor]] = {}


class VersionedBlocks:
    """Frames of them are made once, and are the same for everybody."""

    def __init__(
        self,
        blocks: Sequence[Tensor],
        changed: Mapping[str, Round],
        metadata: Mapping[str, str],
        before: Round = 0,
        differences: Mapping[str, Sequence[Tensor]] = NOTHING,
    ) -> None:
        """`changed` says of each block in which round it changed last; `differences` are to the round `before`.

        That is what most trainers have.
        """
        self._blocks = blocks
        self._changed = changed
        self._metadata = metadata
        self._before = before
        self._differences = differences
        self._frames: dict[Round | None, Parts] = {None: _join(blocks, metadata)}

    def parts(self, have: Round | None = None) -> Parts:
        """A frame for who has all blocks as they were after a round; for who has none, of everything.

        Its metadata says since when, if something is left out or is a difference.
        """
        frame = self._frames.get(have)
        if frame is None:
            assert have is not None
            newer = [block for block in self._blocks if self._changed[block[0][0]] > have]
            differences = self._differences if have == self._before else NOTHING
            if len(newer) == len(self._blocks) and not differences:
                frame = self._frames[None]
            else:
                tensors = [tensor for block in newer for tensor in differences.get(block[0][0], (block,))]
                frame = _join(tensors, {**self._metadata, SINCE_KEY: str(have)})
            if have == self._before:  # others ask seldom, and whoever asks decides what they ask for
                self._frames[have] = frame
        return frame


def _join(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Parts:
    parts: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = [encode_header([tensor for tensor, _ in tensors], metadata)]
    for _, data in tensors:
        if len(data) < LARGE_BYTES:
            small.append(data)
            continue
        parts += [b"".join(small), data] if small else [data]
        small = []
    return [*parts, b"".join(small)] if small else parts


GRACE_SECONDS = 0.1  # for those who are about to end; whoever may still need these values has not let them be changed


@dataclass(slots=True)
class Reply:
    """Parts are bytes of its own, or views of the shard's values, which nobody writes before it is called back."""

    round: Round
    parts: Sequence[bytes | memoryview]
    blocks: VersionedBlocks | None = None
    _readers: set[asyncio.Timeout] = field(default_factory=set)
    _is_free: asyncio.Event = field(default_factory=asyncio.Event)
    _is_revoked: bool = False

    def parts_for(self, have: Round | None) -> Sequence[bytes | memoryview]:
        """All parts, or fewer for who has the values of a round."""
        return self.parts if have is None or self.blocks is None else self.blocks.parts(have)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Its parts are read in the block. Raises StaleRound there if they are called back."""
        overwritten = StaleRound(f"round {self.round} is being overwritten")
        if self._is_revoked:
            raise overwritten
        reader = asyncio.timeout(None)
        try:
            async with reader:
                self._readers.add(reader)
                yield
        except TimeoutError:
            if not reader.expired():
                raise
            raise overwritten from None
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._is_free.set()

    async def revoke(self) -> None:
        """Wait until nobody reads it any more; those who go on for long are ended."""
        self._is_revoked = True
        loop = asyncio.get_running_loop()
        until = loop.time() + GRACE_SECONDS
        while self._readers:
            self._is_free.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._is_free.wait()
            except TimeoutError:
                for reader in self._readers:
                    reader.reschedule(loop.time())
                until = float("inf")
