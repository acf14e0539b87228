"""Data requests as values, their form on the wire (headers, and the metadata of frames), and small answers to them.

A value describes a request, and the fence identifies its sender and its round. Code between the two ends passes values
on without reading their fields, so that a new field needs one line here and one reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import BadInput
from .fence import MAX_DIGITS, is_decimal
from .fields import Count, Flag, Label, Message, Note, Number, Ordinals, Rank, Round
from .norms import AgreedNorm
from .optimizers import HyperParameters, OptimizerSpec, check_hyper_parameters

# Headers.
BARRIER_HEADER = "gradpost-barrier"  # "batch" or "fetch"; on a get or a norm request "batch"
VERDICT_HEADER = "gradpost-verdict"  # "nonfinite" with a batch barrier whose gradient holds NaN or infinity
HAVE_HEADER = "gradpost-have"  # on a get in the synchronous mode: the base version, so that only newer blocks are sent
NORM_HEADER = "gradpost-norm"  # on a get with clipping: see norms.py
WAIT_HEADER = "gradpost-wait-seconds"  # after which the server answers round_pending

# Metadata of a contribution's last frame.
NUM_BLOCKS_KEY = "num_blocks"
HYPER_PARAMETERS_KEY = "hyper_parameters"
COMPUTED_ON_KEY = "computed_on"

# Metadata of the answer to a get: in the synchronous mode the outcome of its round.
SKIPPED_KEY = "skipped_for"  # the trainers whose gradients were not finite, so that the round was skipped
SINCE_KEY = "since"  # blocks that have not changed after this round are left out
APPLIED_KEY = "applied"  # in asynchronous modes: the number of applied contributions of all trainers
POSITION_KEY = "position"  # in asynchronous modes with sparse parameters: the base of the trainer's next pull
HISTORY_KEY = "history"  # of a shard between contributions: the newest step of each trainer in it

# Metadata of frames of optimizer state.
STATES_KEY = "states"  # the step states that a state_dict needs; a pushed frame with it holds slots only
SLOT_NAMES_KEY = "slots"  # the names of all slots

WAIT_SECONDS = 10.0  # how long a pserver holds a request back before it answers which trainers are missing
MAX_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The announcement of a whole contribution to a pserver, which its last frame carries."""

    num_blocks: int  # in all frames to this pserver, with slots and step states
    hyper_parameters: list[HyperParameters]
    computed_on: Round | None = None  # asynchronous modes: the step after which the parameters were pulled

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the frame."""
        metadata = {
            NUM_BLOCKS_KEY: str(self.num_blocks),
            HYPER_PARAMETERS_KEY: json.dumps(self.hyper_parameters, separators=(",", ":")),
        }
        if self.computed_on is not None:
            metadata[COMPUTED_ON_KEY] = str(self.computed_on)
        return metadata

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], optimizer: OptimizerSpec) -> Completion | None:
        """Read the metadata of a frame; None if it is not the last one. Raises BadInput."""
        num_blocks = _read_number(metadata, NUM_BLOCKS_KEY, max_digits=9)
        if num_blocks is None:
            return None
        try:
            hyper_parameters = json.loads(metadata.get(HYPER_PARAMETERS_KEY, "null"))
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{HYPER_PARAMETERS_KEY} is not JSON: {error}", code="bad_hyper_parameters") from None
        return cls(
            num_blocks,
            check_hyper_parameters(optimizer, hyper_parameters),
            _read_number(metadata, COMPUTED_ON_KEY, MAX_DIGITS),
        )


def _read_number(metadata: Mapping[str, str], key: str, max_digits: int) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    if not is_decimal(text, max_digits):
        raise BadInput(f"{key} is not a number", code="malformed_frame", expected="decimal digits", actual=text[:40])
    return int(text)


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier of a trainer, by itself or with a pull."""

    kind: Literal["batch", "fetch"] = "batch"
    is_finite: bool = True  # the verdict of the trainer on its gradient

    def to_headers(self) -> dict[str, str]:
        """Return the headers of a barrier request, or of the pull that carries the barrier."""
        verdict = {} if self.is_finite else {VERDICT_HEADER: "nonfinite"}
        return {BARRIER_HEADER: self.kind, **verdict}

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Barrier:
        """Parse lower-case headers. Raises BadInput."""
        verdict = headers.get(VERDICT_HEADER, "finite")
        if verdict not in ("finite", "nonfinite"):
            raise _bad_header(VERDICT_HEADER, "is not a verdict", "finite or nonfinite", verdict)
        match headers.get(BARRIER_HEADER):
            case "batch" | "fetch" as kind:
                return cls(kind, verdict == "finite")
            case other:
                raise _bad_header(BARRIER_HEADER, "is not a barrier", "batch or fetch", other)


@dataclass(frozen=True, slots=True)
class Pull:
    """A request for one version of a shard, or for the norm of the gradient that leads to that version."""

    round: Round
    barrier: Barrier | None = None  # the batch barrier, which may come with a pull
    names: tuple[str, ...] = ()  # of blocks; all if it is empty
    base: Round | None = None  # the version that the trainer holds; blocks that have not changed since are omitted
    norm: AgreedNorm | None = None  # lets the pserver step a round whose gradients are clipped
    wait_seconds: float = WAIT_SECONDS  # the longest wait for the answer

    def to_headers(self) -> dict[str, str]:
        """Return the headers.

        >>> Pull(7, Barrier(is_finite=False), base=6).to_headers()  # doctest: +NORMALIZE_WHITESPACE
        {'gradpost-wait-seconds': '10', 'gradpost-barrier': 'batch', 'gradpost-verdict': 'nonfinite',
         'gradpost-have': '6'}
        """
        headers = {WAIT_HEADER: f"{self.wait_seconds:g}"}
        if self.barrier is not None:
            headers |= self.barrier.to_headers()
        if self.norm is not None:
            headers[NORM_HEADER] = self.norm.to_header()
        if self.base is not None:
            headers[HAVE_HEADER] = str(self.base)
        return headers

    @classmethod
    def from_headers(cls, round_: Round, headers: Mapping[str, str]) -> Pull:
        """Parse lower-case headers; the names are in the body. Raises BadInput."""
        barrier = Barrier.from_headers(headers) if BARRIER_HEADER in headers else None
        if barrier is not None and barrier.kind != "batch":
            raise BadInput("a pull may carry the batch barrier only", code="bad_header", expected="batch")
        norm = AgreedNorm.from_header(headers[NORM_HEADER]) if NORM_HEADER in headers else None
        base = headers.get(HAVE_HEADER)
        if base is not None and not is_decimal(base):
            raise _bad_header(HAVE_HEADER, "is not a round", "digits", base)
        wait = headers.get(WAIT_HEADER, "0")
        try:
            seconds = float(wait)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_WAIT_SECONDS:
            raise _bad_header(WAIT_HEADER, "is not a waiting time", f"0 to {MAX_WAIT_SECONDS:g}", wait)
        return cls(round_, barrier, (), None if base is None else int(base), norm, seconds)

    @property
    def body(self) -> bytes:
        """The body: the names of blocks as a JSON list, or nothing."""
        return json.dumps(self.names).encode() if self.names else b""


def _bad_header(name: str, problem: str, expected: str, actual: str | None) -> BadInput:
    return BadInput(f"the header {name} {problem}", code="bad_header", expected=expected, actual=actual and actual[:40])


@dataclass(frozen=True, slots=True)
class Pulled:
    """The version in the answer to a get, and the outcome of its round."""

    version: Round
    base: Round | None  # blocks that have not changed after it were omitted, and deltas apply to it
    skipped_for: tuple[Rank, ...]  # the ranks with NaN or infinity, because of which the round was skipped
    position: int | None = None  # the base of the next pull, where that is not the version

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the outcome.

        >>> Pulled(7, None, (0,)).to_metadata()
        {'skipped_for': '[0]'}
        """
        return {SKIPPED_KEY: json.dumps(self.skipped_for)} if self.skipped_for else {}

    @classmethod
    def from_metadata(cls, version: Round, metadata: Mapping[str, str]) -> Pulled:
        """Read the metadata of a pserver's answer."""
        base = metadata.get(SINCE_KEY)
        skipped_for, position = json.loads(metadata.get(SKIPPED_KEY, "[]")), metadata.get(POSITION_KEY)
        return cls(version, _to_int(base), tuple(skipped_for), _to_int(position))


def _to_int(text: str | None) -> int | None:
    return None if text is None else int(text)


class PushAnswer(Message):
    """The answer to a push: how many of its blocks are new, and whether its round was already applied."""

    status: Literal["staged", "already_applied"]
    staged: Count = 0
    duplicates: Count = 0
    complete: Flag = False


class BarrierAnswer(Message):
    """The answer to a barrier: the open round and the trainers that its batch barrier waits for.

    `notice` describes lost trainers and when the run fails without them.
    """

    round: Round
    missing: Ordinals = ()
    notice: Note = ""


class NormAnswer(Message):
    """The sum of squares of a pserver's part of a round's gradient, and a digest of the contributions in it.

    The sum is None if the round was applied without a norm: it stepped nothing, or was restored from a disk.
    """

    contributions: Label = ""
    sum_of_squares: Number | None = None
