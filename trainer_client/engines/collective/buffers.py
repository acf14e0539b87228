"""Memory for collectives, allocated once: gradients that are summed, and tensors that one process broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ps_protocol.errors import BadInput, ContributionConflict

from ...session.collectives import Collectives

BYTES = 4  # of a float32 element
PIECE = 1 << 16  # elements that are squared at once, in memory that an allocator keeps
PART_BYTES = 32 * 1024 * 1024  # the most bytes of one broadcast
ALIGNMENT_BYTES = 16  # of each tensor in a broadcast, for any dtype


class FlatBucket:
    """The gradients of several parameters in one flat tensor, last layers first."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Allocate the memory; `sizes` are the numbers of elements by parameter name."""
        self.flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=device)  # (sum of sizes,)
        self.parts = dict(
            zip(sizes, torch.split(self.flat, list(sizes.values())), strict=True)
        )  # name -> (size,) float32
        self.filled: set[str] = set()  # parameters with a gradient of the next step

    def put(self, name: str, gradient: Tensor) -> None:
        """Copy a flat gradient of any dtype into the bucket."""
        self.parts[name].copy_(gradient)
        self.filled.add(name)

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy the missing gradients, with zeros for parameters without one."""
        for name, part in self.parts.items():
            if name in self.filled:
                continue
            if name in gradients:
                part.copy_(gradients[name])
            else:
                part.zero_()

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares of all elements, a float64 scalar on their device."""
        pieces = (piece.double() for piece in torch.split(self.flat, PIECE))
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()

    def clear(self) -> None:
        """Begin the next step, without gradients."""
        self.filled.clear()


def cut_buckets(parameters: Mapping[str, Tensor], bucket_bytes: int, device: torch.device) -> list[FlatBucket]:
    """Return buckets of about `bucket_bytes` for all parameters, in the order in which backward makes gradients.

    A parameter is never cut: one that is larger has a bucket of its own.

    >>> shapes = {"a": torch.empty(10), "b": torch.empty(2, 5), "c": torch.empty(10)}
    >>> [list(bucket.parts) for bucket in cut_buckets(shapes, 80, torch.device("cpu"))]
    [['c', 'b'], ['a']]
    """
    groups: list[dict[str, int]] = [{}]
    for name, parameter in reversed(list(parameters.items())):
        if groups[-1] and BYTES * (sum(groups[-1].values()) + parameter.numel()) > bucket_bytes:
            groups.append({})
        groups[-1][name] = parameter.numel()
    return [FlatBucket(group, device) for group in groups if group]


class FlatGradients:
    """The gradients of one step after the other, in buckets that all processes send in the same order.

    Collectives need that order. Used by one thread at a time; no method blocks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        bucket_bytes: int,
        device: torch.device,
        send: Callable[[FlatBucket], None],
    ) -> None:
        """Allocate the buckets. `send` begins the collective of a bucket, which must not change until `clear`."""
        self.buckets = cut_buckets(parameters, bucket_bytes, device)
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.parts}
        self._num_sent = 0  # buckets of this step, in order
        self._parameters = parameters
        self._send = send
        self.is_spoiled = False  # a bucket was sent with discarded gradients

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a flat gradient. A bucket is sent once it and all earlier buckets are full, but for frozen parameters."""
        self.check()
        self.bucket_of[name].put(name, gradient)
        while self._num_sent < len(self.buckets) and self._is_full(self.buckets[self._num_sent]):
            self._send_next()

    def _is_full(self, bucket: FlatBucket) -> bool:
        is_full = all(name in bucket.filled or not self._parameters[name].requires_grad for name in bucket.parts)
        if is_full:
            bucket.complete({})
        return is_full

    def _send_next(self) -> None:
        bucket = self.buckets[self._num_sent]
        self._num_sent += 1
        self._send(bucket)

    def check(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Raise ContributionConflict if the step cannot be taken, `gradient_changed` if a gradient comes too late."""
        if self.is_spoiled:
            raise ContributionConflict(
                "gradients of a discarded step were sent to the other processes. Restart the script"
            )
        for bucket in self.buckets[: self._num_sent]:
            if late := bucket.parts.keys() & (gradients or {}).keys() - bucket.filled:
                raise BadInput(
                    f"{min(late)!r} was frozen when its bucket was sent, but has a gradient. Clear its .grad, or "
                    "change requires_grad before the step's first backward pass",
                    code="gradient_changed",
                )

    def send_rest(self, gradients: Mapping[str, Tensor]) -> None:
        """Send the other buckets with these flat gradients, and zeros for parameters without a gradient."""
        for bucket in self.buckets[self._num_sent :]:
            bucket.complete(gradients)
            self._send_next()

    def clear(self) -> None:
        """Begin the next step, without gradients."""
        self._num_sent = 0
        for bucket in self.buckets:
            bucket.clear()

    def discard(self) -> None:
        """Discard the added gradients. If a bucket was sent, the step cannot be repeated."""
        self.is_spoiled = self.is_spoiled or self._num_sent > 0
        for bucket in self.buckets:
            bucket.clear()


class BroadcastBuffer:
    """A packed copy, on one device, of tensors of any dtype and device, whose shapes and dtypes stay."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._parts = torch.split(flat, PART_BYTES)
        self._views = {
            name: memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), memory in zip(tensors.items(), torch.split(flat, sizes), strict=True)
        }

    @torch.no_grad()
    def begin_broadcast(self, collectives: Collectives, source: int, *, sends: bool) -> None:
        """Begin to broadcast the tensors of process `source`, which alone `sends`; all processes call it.

        `write_back` follows the end in the other processes.
        """
        for name, view in self._views.items() if sends else ():
            view.copy_(self._tensors[name])
        for part in self._parts:
            collectives.broadcast(part, source)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the received values to the tensors."""
        for name, view in self._views.items():
            self._tensors[name].copy_(view)
