"""The reply frame of one version, shared by concurrent gets, and the encoding of its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES
from ps_protocol.errors import StaleRound
from ps_protocol.frames import encode_header
from ps_protocol.requests import SINCE_KEY
from ps_protocol.vocabulary import DTYPE_BYTES, Round
from ps_protocol.wire_types import WireTensor
from services.runtime.gate import current_request, end_request

from .bodies import view_bytes
from .layout import BlockPlace

LARGE_BYTES = 1 << 16  # larger tensors are sent without a copy; smaller ones are joined
GRACE_SECONDS = 0.1  # for readers that are about to end: a trainer that needs these values has sent no barrier yet

Parts: TypeAlias = Sequence[bytes | memoryview]
EncodedTensor: TypeAlias = tuple[WireTensor, bytes | memoryview]
EncodedRows: TypeAlias = tuple[list[WireTensor], memoryview]  # several tensors, and the bytes of all
NO_DELTAS: Mapping[str, Sequence[EncodedTensor]] = {}


class PulledViews:
    """Blocks of `values`, the shard's flat float32 tensor, as trainers pull them. Float32 blocks are not copied.

    A stretch is of blocks that lie one after another in the flat tensor, without padding, and have the same dtype.
    """

    def __init__(self, values: Tensor, places: Sequence[BlockPlace]) -> None:
        self._stretches: list[memoryview] = []
        self._blocks: list[tuple[WireTensor, int, int, int]] = []  # with its stretch, and its first and last byte there
        self._converted: list[tuple[Tensor, Tensor]] = []  # memory of stretches in other dtypes, and their values
        stretches: list[list[BlockPlace]] = []
        for place in places:
            if not stretches or (stretches[-1][-1].pulled, stretches[-1][-1].end) != (place.pulled, place.begin):
                stretches.append([])
            stretches[-1].append(place)
        for number, stretch in enumerate(stretches):
            dtype, begin = stretch[0].pulled, stretch[0].begin
            pulled = exact = values[begin : stretch[-1].end]
            if dtype != "F32":
                pulled = torch.empty(len(exact), dtype=TORCH_DTYPES[dtype])
                self._converted.append((pulled, exact))
            self._stretches.append(view_bytes(pulled))
            width = DTYPE_BYTES[dtype]
            for place in stretch:
                tensor = place.name, dtype, (place.block.num_elements,)
                self._blocks.append((tensor, number, width * (place.begin - begin), width * (place.end - begin)))

    def read(self, *, copied: bool) -> tuple[Sequence[EncodedTensor], Sequence[memoryview]]:
        """Return the blocks with their bytes in plan order, and the same bytes in fewer pieces.

        They are valid until the values change, unless they are copied.
        """
        for pulled, exact in self._converted:
            pulled.copy_(exact)
        pieces = [memoryview(bytes(each)) for each in self._stretches] if copied else self._stretches
        return [(tensor, pieces[number][begin:end]) for tensor, number, begin, end in self._blocks], pieces


def copy_blocks(values: Tensor, blocks: Iterable[tuple[BlockPlace, str]], target: memoryview) -> None:
    """Copy blocks of `values`, the shard's flat float32 tensor, to the target, each in the dtype beside it."""
    at, bytes_of_values = 0, view_bytes(values)
    for place, dtype in blocks:
        count = place.block.num_elements
        end = at + DTYPE_BYTES[dtype] * count
        if dtype == "F32" and end - at < LARGE_BYTES:  # takes a tenth of the time of a tensor's copy
            target[at:end] = bytes_of_values[4 * place.begin : 4 * place.end]
        elif count:
            copy = torch.frombuffer(target, dtype=TORCH_DTYPES[dtype], count=count, offset=at)
            copy.copy_(values[place.begin : place.end])
        at = end


class VersionedBlocks:
    """The blocks of one version, which are sent whole, or as the change since the version that a trainer has.

    A frame is made once, and is the same for all trainers.
    """

    def __init__(
        self,
        pulled: tuple[Sequence[EncodedTensor], Sequence[memoryview]],
        changed: Mapping[str, Round],
        metadata: Mapping[str, str],
        base: Round = 0,
        deltas: Mapping[str, Sequence[EncodedTensor]] = NO_DELTAS,
        rows: EncodedRows | None = None,
    ) -> None:
        """`pulled` is from `PulledViews`. `changed` names the round in which each block changed last.

        `deltas` apply to the version `base`, which most trainers have. So do the changed `rows` of sparse blocks, which
        no other frame has.
        """
        self.base = base
        self._rows = rows
        self._blocks, pieces = pulled
        self._changed = changed
        self._metadata = metadata
        self._deltas = deltas
        whole = _join([tensor for tensor, _ in self._blocks], pieces, metadata)
        self._frames: dict[Round | None, Parts] = {None: whole}

    def parts(self, base: Round | None = None) -> Parts:
        """Return the frame for a trainer that has all blocks of version `base`; None is a trainer without blocks.

        The frame's metadata contains `base` if a block is left out or is a delta.
        """
        frame = self._frames.get(base)
        if frame is None:
            assert base is not None
            newer = [block for block in self._blocks if self._changed[block[0][0]] > base]
            deltas = self._deltas if base == self.base else NO_DELTAS
            if len(newer) == len(self._blocks) and not deltas and self._rows is None:
                frame = self._frames[None]
            else:
                tensors = [tensor for block in newer for tensor in deltas.get(block[0][0], (block,))]
                rows, data = self._rows or ([], b"")
                entries, pieces = [*(tensor for tensor, _ in tensors), *rows], [*(its for _, its in tensors), data]
                frame = _join(entries, pieces, {**self._metadata, SINCE_KEY: str(base)})
            if base == self.base:  # other versions are rare, and a client chooses how many it asks for
                self._frames[base] = frame
        return frame


def _join(tensors: Sequence[WireTensor], pieces: Iterable[bytes | memoryview], metadata: Mapping[str, str]) -> Parts:
    """Return a frame of these tensors, whose bytes are those of the pieces."""
    parts: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = [encode_header(tensors, metadata)]
    for piece in pieces:
        if len(piece) < LARGE_BYTES:
            small.append(piece)
            continue
        parts += [b"".join(small), piece] if small else [piece]
        small = []
    return [*parts, b"".join(small)] if small else parts


@dataclass(slots=True)
class Reply:
    """One version's frame. Its parts are bytes of its own, or borrowed views of the shard's values.

    The values of borrowed views are not written before the reply is revoked.
    """

    round: Round
    parts: Parts
    blocks: VersionedBlocks | None = None
    _readers: set[asyncio.Task[Any]] = field(default_factory=set)
    _is_free: asyncio.Event = field(default_factory=asyncio.Event)
    _is_revoked: bool = False

    def parts_for(self, base: Round | None) -> Parts:
        """Return all parts, or fewer for a trainer that has the values of version `base`."""
        return self.parts if base is None or self.blocks is None else self.blocks.parts(base)

    def has_rows_since(self, base: Round | None) -> bool:
        """Return whether the frame for a trainer with version `base` contains the changed rows of sparse blocks."""
        return self.blocks is None or self.blocks.base == base

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Allow reading the parts within the block. The request is ended if borrowed views are revoked."""
        if not any(isinstance(part, memoryview) for part in self.parts):
            yield
            return
        if self._is_revoked:
            raise self._make_error()
        request = current_request()
        self._readers.add(request)
        try:
            yield
        finally:
            self._readers.discard(request)
            if not self._readers:
                self._is_free.set()

    def _make_error(self) -> StaleRound:
        return StaleRound(f"round {self.round} is being overwritten")

    async def revoke(self) -> None:
        """Wait until there are no readers; after a moment the remaining ones are ended."""
        self._is_revoked = True
        loop = asyncio.get_running_loop()
        until = loop.time() + GRACE_SECONDS
        while self._readers:
            self._is_free.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._is_free.wait()
            except TimeoutError:
                for request in self._readers:
                    end_request(request, self._make_error())
                until = float("inf")
