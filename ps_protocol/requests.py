"""Data requests as values, and their form on the wire: headers, and the metadata of frames.

A value describes a request, and the fence identifies its sender and its round. Code between the two ends passes values
on without reading their fields, so that a new field needs one line here and one reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .norms import AgreedNorm
from .optimizers import HyperParameters
from .routes import (
    BARRIER_HEADER,
    COMPUTED_ON_KEY,
    GRAD_SCALER_KEY,
    HAVE_HEADER,
    HYPER_PARAMETERS_KEY,
    NORM_HEADER,
    NUM_BLOCKS_KEY,
    NUM_SLOTS_KEY,
    SINCE_KEY,
    SKIPPED_BEFORE_KEY,
    SKIPPED_KEY,
    VERDICT_HEADER,
    WAIT_HEADER,
)
from .vocabulary import Rank, Round

WAIT_SECONDS = 10.0  # how long a pserver holds a request back before it answers which trainers are missing


@dataclass(frozen=True, slots=True)
class Push:
    """The metadata of the last frame of a contribution to a pserver, which makes the contribution complete."""

    num_blocks: int
    hyper_parameters: Sequence[HyperParameters]
    computed_on: Round | None = None  # asynchronous modes: the step after which the parameters were pulled
    num_slots: int = 0  # slots and step states in other frames of the contribution

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the frame."""
        metadata = {
            NUM_BLOCKS_KEY: str(self.num_blocks),
            HYPER_PARAMETERS_KEY: json.dumps(self.hyper_parameters, separators=(",", ":")),
        }
        if self.computed_on is not None:
            metadata[COMPUTED_ON_KEY] = str(self.computed_on)
        if self.num_slots:
            metadata[NUM_SLOTS_KEY] = str(self.num_slots)
        return metadata


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier of a trainer, by itself or with a pull."""

    kind: Literal["batch", "fetch"] = "batch"
    is_finite: bool = True  # the trainer's gradient, as far as the trainer and the pservers have found

    def to_headers(self) -> dict[str, str]:
        """Return the headers of a barrier request, or of the pull that carries the barrier."""
        verdict = {} if self.is_finite else {VERDICT_HEADER: "nonfinite"}
        return {BARRIER_HEADER: self.kind, **verdict}


@dataclass(frozen=True, slots=True)
class Pull:
    """A request for one version of a shard, or for the norm of the gradient that leads to that version."""

    round: Round
    barrier: Barrier | None = None  # the batch barrier, which may come with a pull
    names: tuple[str, ...] = ()  # of blocks; all if it is empty
    base: Round | None = None  # the version that the trainer holds; blocks that have not changed since are omitted
    norm: AgreedNorm | None = None  # lets the pserver step a round whose gradients are clipped

    def to_headers(self) -> dict[str, str]:
        """Return the headers.

        >>> Pull(7, Barrier(is_finite=False), base=6).to_headers()  # doctest: +NORMALIZE_WHITESPACE
        {'gradpost-wait-seconds': '10', 'gradpost-barrier': 'batch', 'gradpost-verdict': 'nonfinite',
         'gradpost-have': '6'}
        """
        headers = {WAIT_HEADER: f"{WAIT_SECONDS:g}"}
        if self.barrier is not None:
            headers |= self.barrier.to_headers()
        if self.norm is not None:
            headers[NORM_HEADER] = self.norm.to_header()
        if self.base is not None:
            headers[HAVE_HEADER] = str(self.base)
        return headers

    @property
    def body(self) -> bytes:
        """The body: the names of blocks as a JSON list, or nothing."""
        return json.dumps(self.names).encode() if self.names else b""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of pulling a shard."""

    version: Round
    base: Round | None  # blocks that have not changed after it were omitted, and deltas apply to it
    skipped: Mapping[Round, tuple[Rank, ...]]  # skipped rounds among the newest: the ranks with NaN or infinity
    scaler: HyperParameters | None  # the state of the lowest rank's GradScaler in this round

    @classmethod
    def from_metadata(cls, version: Round, metadata: Mapping[str, str]) -> Pulled:
        """Read the metadata of a pserver's answer."""
        before = json.loads(metadata.get(SKIPPED_BEFORE_KEY, "{}"))
        skipped = {int(round_): tuple(ranks) for round_, ranks in before.items()}
        if SKIPPED_KEY in metadata:
            skipped[version] = tuple(json.loads(metadata[SKIPPED_KEY]))
        base = metadata.get(SINCE_KEY)
        scaler = json.loads(metadata.get(GRAD_SCALER_KEY, "null"))
        return cls(version, None if base is None else int(base), skipped, scaler)
