"""The pservers of a planned run: pushes and pulls of whole models, and requests to all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.frames import encode_header
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import Barrier, Pull, Pulled
from ps_protocol.vocabulary import NonfinitePolicy, PserverIndex, Round

from ..transport.destinations import ShardDestination
from ..transport.tensors import flatten_checked, writable_bytes
from ..transport.work import Batch, Work, together
from .buckets import Bucket, FrameParts, make_buckets
from .error_feedback import ErrorFeedback
from .news import Attempt
from .place import TrainerPlace
from .pserver_client import PserverClient
from .round_results import NormAgreement, RoundResults, finish_rounds
from .telemetry import TrainerMetrics

T = TypeVar("T")

MAX_CONCURRENT_PUSHES = 4  # per pserver; more would only queue in the connection


@dataclass(frozen=True)
class DeclaredRun:
    """The run that all trainers have declared alike, and its plan."""

    plan: SlicePlan
    start: Round = 1  # the first round that this trainer pushes for
    nonfinite: NonfinitePolicy = "reject"
    max_grad_norm: float | None = None
    rendezvous: str | None = None  # strategy ring: the address of the lowest rank


class PserverGroup:
    """All pservers of a run, as one trainer uses them.

    Work ends with the error that ended the run (`TrainerLost`, `RoundTimeout`, …).
    """

    def __init__(
        self,
        clients: Sequence[PserverClient],
        run: DeclaredRun,
        coordinator: TrainerPlace,
        results: RoundResults,
        metrics: TrainerMetrics,
    ) -> None:
        """Use a client for each pserver, in the order of their indices. Pulls write to `results`."""
        self.clients = clients
        self.feedback = ErrorFeedback()
        self.pushed_round: Round = 0  # the newest round of which a part may have left
        self._run = run
        self._max_delay = coordinator.joined.consistency.max_delay
        self._is_async = coordinator.joined.consistency.is_async
        # In asynchronous modes the engine has clipped each gradient before its pushes.
        self._clips_rounds = run.max_grad_norm is not None and not self._is_async
        self._coordinator = coordinator
        self._results = results
        self._metrics = metrics

    def follow(self, attempt: Attempt) -> None:
        """Forget all pushes, and continue after the version that this attempt of the run began with."""
        for client in self.clients:
            client.follow(attempt)
        self.feedback.reset()
        self.pushed_round = attempt.base_round

    def ask_all(self, ask: Callable[[PserverClient], Work[T]]) -> Work[list[T]]:
        """Ask all pservers concurrently, and return the results in the order of their indices."""
        return together(map(ask, self.clients))

    # ------------------------------------------------------------------ pushes

    @property
    def takes_whole_steps(self) -> bool:
        """True if a pull may carry the contribution. A clipped round needs its norm before the pull."""
        return not (self._is_async or self._max_delay or self._clips_rounds)

    def begin_pushes(self, round_: Round) -> None:
        """Note that parts of this round leave from now on. With `max_delay` earlier rounds count as applied."""
        if self._max_delay:
            self.feedback.resolve(is_applied=round_ > self.pushed_round)
        self.pushed_round = round_

    def forget_pushes(self, round_: Round) -> None:
        """Forget the frames of a round that will be pushed again as a whole."""
        for client in self.clients:
            client.forget_pushes(round_)

    def find_nonfinite(self, bucket: Bucket) -> str | None:
        """Return a parameter with NaN or infinity in a filled bucket, if there is one; under `allow` none is read."""
        return None if self._run.nonfinite == "allow" else bucket.find_nonfinite()

    def withhold_nonfinite(self, round_: Round, buckets: Iterable[Bucket]) -> bool:
        """Empty each filled bucket that holds NaN or infinity, and return True if there is none: the verdict.

        Raises NonFiniteGradient under `reject`. The bytes of a bucket do not depend on the other buckets, some of which
        may have left already: a step that is pushed again is the same bytes.
        """
        faulty = [bucket for bucket in buckets if self.find_nonfinite(bucket) is not None]
        if faulty and self._run.nonfinite == "reject":
            text = f"NaN or infinity in the gradient of {faulty[0].find_nonfinite()!r} in round {round_}"
            raise NonFiniteGradient(
                text if self._is_async else f"{text}. To skip such rounds, set --nonfinite skip_round"
            )
        for bucket in faulty:
            bucket.fill({})
        return not faulty

    def push(self, round_: Round, pserver: PserverIndex, frame: FrameParts) -> Work[None]:
        """Push one frame, which must not change until this has ended."""
        return self.clients[pserver].push(round_, frame)

    def send_initial(self, values: Mapping[str, Tensor], bucket_bytes: int) -> Work[None]:
        """Upload the initial values of all parameters and buffers; only the elected uploader may."""
        plan = self._run.plan
        parameters = flatten_checked(plan, {name: values[name] for name in plan.parameter})
        frames: list[list[FrameParts]] = []
        for shard in make_buckets(plan, bucket_bytes=bucket_bytes):
            for bucket in shard:
                bucket.fill(parameters)
            frames.append([bucket.frame() for bucket in shard])
        for spec in plan.buffers:
            header = encode_header([(spec.name, spec.dtype, spec.shape)])
            data = values[spec.name].detach().to("cpu").contiguous()
            frames[spec.pserver].append((memoryview(header), writable_bytes(data)))
        yield from together(_send_initial(*each) for each in zip(self.clients, frames, strict=True))

    # ------------------------------------------------------------------ pulls

    def pull(
        self,
        round_: Round,
        destinations: Sequence[ShardDestination],
        *,
        barrier: Barrier | None = None,
        on_block: Callable[[str], None] | None = None,
        pushed: Sequence[FrameParts] = (),
    ) -> Work[None]:
        """Wait for version `round_` of every shard, and write it to the destinations; a batch barrier may come with it.

        Blocks that have not changed since the base of their destination are left out. Without deltas `on_block` is
        called with the name of each complete block. If the run `takes_whole_steps`, each request may carry a frame of
        `pushed`: the last one of the contribution to its pserver.
        """
        bases = [destination.base for destination in destinations]
        for destination in destinations:
            destination.base = None  # until the pull has succeeded

        def get(index: int, norm: AgreedNorm | None) -> Work[Pulled]:
            pull = Pull(round_, barrier, (), bases[index], norm)
            return self.clients[index].get(pull, destinations[index], on_block, pushed[index] if pushed else ())

        if not self._clips_rounds or round_ == 0:
            answers = yield from together(get(index, None) for index in range(len(destinations)))
        else:
            answers = yield from self._pull_clipped(Pull(round_, barrier), get)
        for destination, pulled in zip(destinations, answers, strict=True):
            destination.base = pulled.version if pulled.position is None else pulled.position
        self._note_results(round_, answers)
        self._coordinator.note_pulled(round_)

    def _pull_clipped(
        self, pull: Pull, get: Callable[[PserverIndex, AgreedNorm | None], Work[Pulled]]
    ) -> Work[list[Pulled]]:
        """Call `get` for all pservers with the norm of the gradient, which all of them are asked for first."""

        def ask() -> Work[list[ShardNorm | None]]:
            return together(client.norm(pull) for client in self.clients)

        if pull.round == self._run.start - 1:  # its first pull; all trainers of the rounds before may have left
            yield from finish_rounds(self.clients, pull.round, self._max_delay)
        agreement = NormAgreement(ask)
        bringing = (agreement.bring(index, partial(get, index)) for index in range(len(self.clients)))
        answers = yield from together(bringing)
        self._results.grad_norm = agreement.norm
        return answers

    def _note_results(self, round_: Round, answers: Sequence[Pulled]) -> None:
        """Note the outcome of the rounds that a pull reports: applied or skipped."""
        skipped = {pulled.version: pulled.skipped_for for pulled in answers if pulled.skipped_for}
        if not self._max_delay and round_ >= self.pushed_round:  # else a later push is on its way
            self.feedback.resolve(is_applied=round_ not in skipped)
        if round_ in skipped:
            self._results.grad_norm = None if self._run.max_grad_norm is None else math.nan
        known, self._results.skipped = self._results.skipped, tuple(skipped)
        for skipped_round in sorted(skipped.keys() - set(known)):
            self._metrics.skipped.inc()
            names = ", ".join(f"trainer {rank}" for rank in sorted(skipped[skipped_round]))
            self._coordinator.log.warning(
                f"round {skipped_round} was skipped on all pservers: NaN or infinity in gradients of {names}"
            )

    def pull_buffers(self, memory: Mapping[str, memoryview]) -> Work[None]:
        """Fetch all buffers of the run (name -> writable bytes)."""
        buffers: dict[PserverIndex, dict[str, memoryview]] = {}
        for spec in self._run.plan.buffers:
            buffers.setdefault(spec.pserver, {})[spec.name] = memory[spec.name]
        yield from together(self.clients[index].get_buffers(wanted) for index, wanted in buffers.items())


def _send_initial(client: PserverClient, frames: Sequence[FrameParts]) -> Work[None]:
    """Push the frames of initial values to one pserver, some of them concurrently."""
    pushes: Batch[None] = Batch()
    try:
        for frame in frames:
            pushes.add(client.push(0, frame, initial=True))
            due = pushes.advance()
            while len(pushes) == MAX_CONCURRENT_PUSHES:
                yield due
                due = pushes.advance()
        yield from pushes.finish()
    finally:
        pushes.close()
