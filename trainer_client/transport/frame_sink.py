"""Decoding of a reply whose tensors are received straight into their destinations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from time import perf_counter

from ps_protocol.errors import BadInput
from ps_protocol.frames import LENGTH_BYTES, TRUSTED_LIMITS, Frame, parse_header, parse_length
from ps_protocol.requests import SINCE_KEY

from .destinations import RowsDestination

NO_DELTAS: Mapping[str, memoryview] = {}


class FrameSink:
    """An incremental decoder of one frame, which writes to `destinations` (tensor name -> its writable bytes).

    An interrupted frame leaves them partly written; reading the same version again repairs that. Quantised deltas and
    their scales are written to `deltas`, blocks of sparse parameters to `rows`. `on_block` is called with the name of
    each complete block, and of each that the frame omits because its destination holds its values already.
    """

    def __init__(
        self,
        destinations: Mapping[str, memoryview],
        *,
        deltas: Mapping[str, memoryview] = NO_DELTAS,
        rows: Mapping[str, RowsDestination] | None = None,
        on_block: Callable[[str], None] | None = None,
    ) -> None:
        self._on_block = on_block
        self._destinations = destinations
        self._deltas = deltas
        self._rows = rows or {}
        self._expected = destinations.keys() | self._rows.keys()
        self._places: dict[str, memoryview] = {}  # memory of the tensors of this frame, by name
        self.delta_names: list[str] = []  # tensors of this frame that are written to `deltas`
        self._start = bytearray()  # length and header, until they are complete
        self.began = 0.0  # when its first bytes arrived, by `perf_counter`
        self._frame: Frame | None = None
        self.num_bytes = 0  # received bytes of the frame
        self._index = 0  # index of the current tensor
        self._filled = 0  # received bytes of the current tensor

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors in the frame, once its header is complete."""
        return self._places.keys()

    def feed(self, data: bytes | memoryview) -> None:
        """Implement `Sink.feed`."""
        rest = memoryview(data)
        if self._frame is None:
            rest = self._feed_start(rest)
        while len(rest) and self._frame is not None:
            room = self.get_buffer()[: len(rest)]
            if not len(room):
                raise BadInput("the frame is longer than its header says", code="malformed_frame")
            room[:] = rest[: len(room)]
            rest = rest[len(room) :]
            self.buffer_updated(len(room))

    def get_buffer(self) -> memoryview:
        """Implement `Sink.get_buffer`; empty until the header is complete."""
        if self._frame is None:
            return _EMPTY
        tensors = self._frame.tensors
        while self._index < len(tensors):
            entry = tensors[self._index]
            if self._filled < entry.end - entry.begin:
                return self._places[entry.name][self._filled :]
            self._index, self._filled = self._index + 1, 0
        return _EMPTY

    def buffer_updated(self, num_bytes: int) -> None:
        """Implement `Sink.buffer_updated`."""
        self._filled += num_bytes
        self.num_bytes += num_bytes
        if self._frame is None or not (self._on_block or self._rows):
            return
        entry = self._frame.tensors[self._index]
        if self._filled == entry.end - entry.begin and entry.name in self._expected:
            if entry.name in self._rows:
                self._rows[entry.name].complete()
            if self._on_block is not None:
                self._on_block(entry.name)

    def _feed_start(self, data: memoryview) -> memoryview:
        """Collect the length and the header, and return the data behind them."""
        if not self._start:
            self.began = perf_counter()
        self._start += data
        self.num_bytes += len(data)
        if len(self._start) < LENGTH_BYTES:
            return _EMPTY
        data_begin = parse_length(self._start, TRUSTED_LIMITS)
        if len(self._start) < data_begin:
            return _EMPTY
        frame = parse_header(bytes(self._start[LENGTH_BYTES:data_begin]), TRUSTED_LIMITS)
        entries = {entry.name: entry for entry in frame.tensors} if self._rows else {}
        rows = {
            tensor: room for name, its in self._rows.items() for tensor, room in its.make_room(name, entries).items()
        }
        for entry in frame.tensors:
            destination = rows.get(entry.name, self._destinations.get(entry.name))
            if entry.name in self._deltas and (entry.dtype == "I8" or destination is None):
                destination = self._deltas[entry.name]
                self.delta_names.append(entry.name)
            if destination is None or len(destination) != entry.end - entry.begin:
                raise BadInput(
                    f"the reply's tensor {entry.name!r} was not requested in this form",
                    code="malformed_frame",
                    expected="no such tensor" if destination is None else f"{len(destination)} bytes",
                    actual=f"{entry.end - entry.begin} bytes",
                )
            self._places[entry.name] = destination
        self._frame = frame
        if self._on_block is not None and SINCE_KEY in frame.metadata:
            for name in self._expected - self._places.keys():
                self._on_block(name)
        rest = data[len(data) - (len(self._start) - data_begin) :]
        self.num_bytes -= len(rest)
        return rest

    def finish(self) -> Mapping[str, str]:
        """Return the frame's metadata. Raises BadInput unless every destination is complete."""
        if self._frame is None or len(self.get_buffer()):
            raise BadInput("the reply ended early", code="malformed_frame")
        missing = self._expected - self._places.keys()
        if missing and SINCE_KEY not in self._frame.metadata:  # they have not changed
            raise BadInput(f"the reply lacks {sorted(missing)[0]!r}", code="malformed_frame")
        return self._frame.metadata


_EMPTY = memoryview(bytearray())
