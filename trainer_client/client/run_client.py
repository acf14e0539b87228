"""A trainer's client: its place in a run, and the pushes and pulls of whole models to and from all pservers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from structlog.typing import FilteringBoundLogger
from torch import Tensor

from ps_config.control_client import make_control_client
from ps_config.tokens import TokenPair
from ps_protocol.encodings import TORCH_DTYPES
from ps_protocol.errors import BadInput, RolledBack
from ps_protocol.fence import Fence
from ps_protocol.frames import encode_header
from ps_protocol.messages import DeclareModel, PserverInfo, RunSummary, TrainerJoined
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.optimizers import OptimizerSpec
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import Barrier, Pull, Pulled
from ps_protocol.vocabulary import (
    DTYPE_BYTES,
    PROTOCOL_VERSION,
    NonfinitePolicy,
    ParameterSpec,
    PserverIndex,
    Rank,
    Round,
)

from ..transport.destinations import Deltas, ShardDestination
from ..transport.exchange import Exchange
from ..transport.tensors import writable_bytes
from .buckets import Payload, make_buckets
from .error_feedback import ErrorFeedback
from .local_membership import LocalMembership
from .membership import Membership
from .metrics import MetricsServer, TrainerMetrics
from .pserver_client import PserverClient
from .pserver_connection import PserverConnection
from .round_results import NormAgreement, Outcomes, finish_rounds
from .settings import TrainerSettings, read_settings

T = TypeVar("T")

# Settings that a trainer declares with its model, so that they may still be chosen after it has joined.
_OF_THE_MODEL = DeclareModel.model_fields.keys() & TrainerSettings.model_fields.keys()
_OF_THE_TRAINER = {
    *("outer_lr", "outer_momentum", "outer_nesterov"),
    *("bucket_bytes", "overlap", "overlap_pulls", "accumulate_steps"),
}
DECLARED_SETTINGS = _OF_THE_MODEL | _OF_THE_TRAINER
MAX_CONCURRENT_PUSHES = 4  # per pserver; more would only queue in the connection


class RunClient:
    """A trainer's client in one run. Every method runs on the loop that `join` was awaited on.

    Waits end with the error that ended the run (`TrainerLost`, `RoundTimeout`, …).
    """

    def __init__(self, coordinator: str | None = None, **arguments: Any) -> None:
        """Read the settings: `arguments` are fields of `TrainerSettings`; for None, `GRADPOST_*` is read."""
        self.settings: TrainerSettings = read_settings(coordinator=coordinator, **arguments)
        self.metrics = TrainerMetrics()
        self.joined: TrainerJoined
        self.plan: SlicePlan
        self.uploader: Rank
        self.pservers: list[PserverClient] = []
        self.is_declared = False  # all trainers have declared the same, and there is a plan
        self.unfinished: set[asyncio.Task[Any]] = set()  # steps that are on their way
        self._at_leave: list[Callable[[], None]] = []
        self._pushed_round: Round = 0  # the newest that something was pushed for
        self._begun_round: Round = 0  # the newest that some pserver may have counted this trainer in
        self.feedback = ErrorFeedback()
        self.outcomes = Outcomes()
        self._metrics_server: MetricsServer | None = None
        self._lag: asyncio.Task[None] | None = None
        token = self.settings.sent_token
        self._token = None if token is None else TokenPair(token, lambda line: self.log.warning(line))
        self._control = make_control_client(self.settings.client_tls, self._token)
        self._bulk: dict[tuple[bool, str | None], Exchange] = {}
        self.start: Round = 1  # the first round that this trainer pushes for
        self.nonfinite: NonfinitePolicy = "reject"  # of the run
        self.rendezvous: str | None = None  # strategy ring: the address of the lowest rank
        self.max_grad_norm: float | None = None  # of the run
        self.grad_norm: float | None = None  # of the newest round, before it was clipped; NaN if that was skipped
        self.must_upload = False  # the initial values are this trainer's to push
        place = LocalMembership if self.settings.strategy == "local" else Membership
        self.membership = place(self.settings, self._control)

    @property
    def log(self) -> FilteringBoundLogger:
        """The trainer's log; its lines carry the run and the rank."""
        return self.membership.log

    def configure(self, **arguments: Any) -> None:
        """Change settings that count from the declaration of the model on; None changes nothing.

        Raises TypeError for any other setting, which was decided when the trainer joined.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        if late := given.keys() - DECLARED_SETTINGS:
            raise TypeError(
                f"{', '.join(sorted(late))} can be set only before the trainer joins. Pass it to connect(); later "
                f"a script may set only {', '.join(sorted(DECLARED_SETTINGS))}"
            )
        self.settings = TrainerSettings.model_validate({**self.settings.model_dump(), **given})

    # ------------------------------------------------------------------ life

    async def join(self) -> TrainerJoined:
        """Join the run that is gathering. Waits for the coordinator, and for an earlier run to end.

        It also waits up to `retry_seconds` for the token's file, and raises SettingsError if there is none.
        """
        settings, address = self.settings, None
        try:
            if self._token is not None:
                await self._token.wait_for_token(settings.retry_seconds, self.log.info)
            if settings.metrics_port is not None and self._metrics_server is None:
                self._metrics_server = MetricsServer(
                    self.metrics.registry, settings.metrics_host, settings.metrics_port, settings.server_tls
                )
                address = self._metrics_server.address
            self.joined = await self.membership.join(address)
        except BaseException:
            await self.leave("failed")  # closes the connections and the metrics port
            raise
        self._lag = asyncio.create_task(self.metrics.watch_loop_lag(), name="loop lag")
        return self.joined

    def adopt_place(self, joined: TrainerJoined, process: int) -> None:
        """Adopt the leader's place in the run. Called by the follower processes of a host instead of `join`."""
        self.joined = joined
        self.membership.adopt_place(joined, process)

    def adopt_run(self, nonfinite: NonfinitePolicy) -> None:
        """Adopt the run that the leader has declared. Called by the follower processes of a host."""
        self.nonfinite, self.is_declared = nonfinite, True

    def adopt_results(self, round_: Round, outcomes: Outcomes, grad_norm: float | None) -> None:
        """Adopt the results of a round that this client has not pulled: in a ring, or from a host's leader."""
        self.membership.adopt_round(round_)
        self.outcomes, self.grad_norm = outcomes, grad_norm

    async def declare(
        self,
        parameters: Sequence[ParameterSpec],
        optimizer: OptimizerSpec,
        buffers: Sequence[tuple[str, tuple[int, ...], str]] = (),
        aliases: Mapping[str, str] | None = None,
        rendezvous: str | None = None,
    ) -> SlicePlan:
        """Declare the model, and wait until all trainers have declared the same and the pservers have the plan.

        `aliases` are further names of tied tensors (alias -> name), which exported models have, too. `rendezvous` is
        the address at which the trainers of a ring meet, from the lowest rank.
        """
        settings = self.settings
        ready = await self.membership.guard(
            self.membership.declare(
                DeclareModel(
                    run=self.joined.run,
                    incarnation=self.joined.incarnation,
                    parameters=tuple((p.name, p.shape, p.dtype, p.group) for p in parameters),
                    buffers=tuple(buffers),
                    optimizer=optimizer.name,
                    group_flags=optimizer.group_flags,
                    aliases=dict(aliases or {}),
                    rendezvous=rendezvous,
                    **settings.model_dump(include=_OF_THE_MODEL),
                )
            )
        )
        self.plan = SlicePlan.from_json(ready.plan)
        self.uploader = ready.uploader
        self.must_upload = ready.uploader == self.joined.rank and ready.start == 1
        self.start, self.nonfinite, self.rendezvous = ready.start, ready.nonfinite, ready.rendezvous
        self.max_grad_norm = ready.max_grad_norm
        self.membership.adopt_round(ready.start - 1)
        self.membership.news.begin_attempt(ready.attempt)
        for info in ready.pservers:
            fence = Fence(
                protocol=PROTOCOL_VERSION,
                run=ready.run,
                attempt=ready.attempt,
                plan=self.plan.digest,
                pserver=info.index,
                pserver_incarnation=info.incarnation,
                rank=self.joined.rank,
                trainer_incarnation=self.joined.incarnation,
                round=0,
            )
            connection = PserverConnection(
                info,
                fence,
                self._bulk_client,
                self.metrics,
                self.membership.news,
                retry_seconds=settings.retry_seconds,
                deadline_seconds=self.joined.round_timeout_seconds + 30,
            )
            self.pservers.append(PserverClient(connection, max_delay=self.joined.consistency.max_delay))
        self.membership.report_links({pserver.index: pserver.link for pserver in self.pservers})
        self.metrics.local_pservers.set_function(lambda: sum(pserver.link.is_local for pserver in self.pservers))
        self.is_declared = True
        if (done := ready.start - 1) > 0:
            self.log.info(f"continuing run {ready.run} at round {done}: a script that counts its steps begins there")
        with contextlib.suppress(RolledBack):  # what is done next meets it again
            await self.ask_all(lambda pserver: pserver.warm_up())
        return self.plan

    def _bulk_client(self, info: PserverInfo) -> Exchange:
        """Return the connections for tensors. A pserver with a Unix socket has connections of its own."""
        kind = info.http2, info.local if self.settings.local_transport else None
        if kind not in self._bulk:
            self._bulk[kind] = Exchange(self.settings.client_tls, self._token, http2=kind[0], local=kind[1])
        return self._bulk[kind]

    async def go_back(self) -> Round:
        """Follow the run to its newest attempt after RolledBack, and return the version to pull next.

        No request may be under way. `must_upload` says if this trainer pushes the values of that version first.
        """
        news = self.membership.news
        news.adopt_newest_attempt()
        for pserver in self.pservers:
            pserver.go_back(news.attempt)
        if news.uploader is not None:
            self.uploader = news.uploader
        self.feedback.reset()
        self.outcomes = Outcomes()
        self.membership.adopt_round(news.resume)
        self._pushed_round = self._begun_round = news.resume
        self.must_upload = news.uploader == self.joined.rank
        return news.resume

    def begin_round(self, round_: Round) -> None:
        """Note that pservers may count this trainer in the round: leaving before its end is a failure."""
        self._begun_round = round_

    def call_at_leave(self, close: Callable[[], None]) -> None:
        """Call `close` once this trainer has left the run."""
        self._at_leave.append(close)

    async def finish(self) -> None:
        """Wait until every step that has begun is pulled, or has failed."""
        if self.unfinished:
            await asyncio.wait(self.unfinished)

    async def leave(self, outcome: str = "done", reason: str = "", code: str | None = None) -> None:
        """Leave the run, `done` or `failed`, and close all connections.

        Leaving in the middle of a round counts as failed, because only some pservers may have counted this trainer.
        """
        if outcome == "done" and self._begun_round > self.membership.round:
            outcome, reason = "failed", f"it left in the middle of round {self._begun_round}"
        await self.membership.leave(outcome, reason, code)
        for close in self._at_leave:
            close()
        await self._control.aclose()
        for exchange in self._bulk.values():
            await exchange.aclose()
        if self._lag is not None:
            self._lag.cancel()
        if self._metrics_server is not None:
            self._metrics_server.close()

    async def summary(self) -> RunSummary:
        """Return the results of the run, as the services know them."""
        return await self.membership.summary()

    # ------------------------------------------------------------------ pushes

    async def send_initial(self, values: Mapping[str, Tensor]) -> None:
        """Upload the initial values of all parameters and buffers; only the elected uploader may."""
        parameters = self.flatten({name: values[name] for name in self.plan.parameter})
        frames: list[list[Payload]] = []
        for shard in make_buckets(self.plan, bucket_bytes=self.settings.chosen_bucket_bytes):
            for bucket in shard:
                bucket.fill(parameters)
            frames.append([bucket.frame() for bucket in shard])
        for spec in self.plan.buffers:
            header = encode_header([(spec.name, spec.dtype, spec.shape)])
            data = values[spec.name].detach().to("cpu").contiguous()
            frames[spec.pserver].append((memoryview(header), writable_bytes(data)))
        await self.push_all(0, frames, initial=True)

    async def push(self, round_: Round, pserver: PserverIndex, frame: Payload) -> bool:
        """Push one frame, which must not change until this returns. Return True if the pserver found it finite."""
        self._pushed_round = round_
        answer = await self.membership.guard(self.pservers[pserver].push(round_, frame))
        return answer.finite

    async def push_all(self, round_: Round, frames: Sequence[Sequence[Payload]], *, initial: bool = False) -> bool:
        """Push the frames of each pserver, some of them concurrently. Return True if all were found finite."""
        if not initial:
            self._pushed_round = round_

        async def push(pserver: PserverClient, frame: Payload, limit: asyncio.Semaphore) -> bool:
            async with limit:
                return (await pserver.push(round_, frame, initial=initial)).finite

        limits = [asyncio.Semaphore(MAX_CONCURRENT_PUSHES) for _ in self.pservers]
        pushes = (
            push(pserver, frame, limit)
            for pserver, its, limit in zip(self.pservers, frames, limits, strict=True)
            for frame in its
        )
        return all(await self.membership.guard(_gather(pushes)))

    def flatten(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters or gradients as flat CPU tensors. Raises BadInput for another shape or dtype."""
        flat = {}
        for name, tensor in tensors.items():
            spec = self.plan.parameter[name]
            tensor = torch.as_tensor(tensor, device="cpu").detach()
            if tuple(tensor.shape) != spec.shape:
                raise BadInput(
                    f"the tensor for {name!r} has the wrong shape",
                    code="wrong_shape",
                    expected=list(spec.shape),
                    actual=list(tensor.shape),
                )
            if tensor.dtype != TORCH_DTYPES[spec.dtype]:
                raise BadInput(
                    f"the tensor for {name!r} has the wrong dtype",
                    code="wrong_dtype",
                    expected=spec.dtype,
                    actual=str(tensor.dtype),
                )
            flat[name] = tensor.reshape(-1)
        return flat

    # ------------------------------------------------------------------ pulls

    def destinations(self, memory: Mapping[str, memoryview], *, keeps_values: bool = False) -> list[ShardDestination]:
        """Return for each pserver the memory of its blocks within that of whole parameters (name -> bytes).

        `keeps_values`: the memory keeps what is pulled, so that deltas may be added, if the run pulls deltas.
        """
        plan, result = self.plan, []
        for shard in plan.shards:
            blocks, rounded = {}, {}
            for block in shard:
                if block.parameter in memory:
                    dtype = plan.pulled(block.parameter)
                    begin, end = block.begin * DTYPE_BYTES[dtype], block.end * DTYPE_BYTES[dtype]
                    blocks[block.name] = memory[block.parameter][begin:end]
                    if dtype == "F32" and block.parameter not in plan.means:
                        rounded[block.name] = blocks[block.name]
            deltas = Deltas(rounded) if keeps_values and plan.wire.pulls_deltas else None
            result.append(ShardDestination(blocks, deltas))
        return result

    async def pull(
        self,
        round_: Round,
        destinations: Sequence[ShardDestination],
        *,
        barrier: Barrier | None = None,
        is_partial: bool = False,
        on_block: Callable[[str], None] | None = None,
    ) -> None:
        """Wait for version `round_` of every shard, and write it to the destinations; a batch barrier may come with it.

        Blocks that have not changed since the version of their destination are left out. If `is_partial`, only
        blocks that have a destination are pulled. Without deltas `on_block` is called with the name of each complete
        block.
        """
        bases = [destination.forget_version() for destination in destinations]  # until the pull has succeeded

        async def get(index: int, norm: AgreedNorm | None) -> Pulled:
            destination = destinations[index]
            names = tuple(destination.blocks) if is_partial else ()
            pull = Pull(round_, barrier, names, bases[index], norm)
            return await self.pservers[index].get(pull, destination, on_block)

        indices = [index for index, one in enumerate(destinations) if one.blocks or not is_partial]
        pulled = await self._get_all(Pull(round_, barrier), indices, get)
        for index, one in zip(indices, pulled, strict=True):
            destinations[index].note_pulled(one.version)
        self._note_results(round_, pulled)
        if not is_partial:
            self.membership.note_pulled(round_)

    async def _get_all(
        self,
        pull: Pull,
        indices: Sequence[PserverIndex],
        get: Callable[[PserverIndex, AgreedNorm | None], Coroutine[Any, Any, Pulled]],
    ) -> list[Pulled]:
        """Call `get` for these pservers. If gradients are clipped, all pservers are asked for their norm first."""
        if self.max_grad_norm is None or pull.round == 0:
            return await self.membership.guard(_gather(get(index, None) for index in indices))

        async def ask() -> list[ShardNorm | None]:
            return await _gather(pserver.norm(pull) for pserver in self.pservers)

        if pull.round == self.start - 1:
            await self.membership.guard(finish_rounds(self.pservers, pull.round, self.joined.consistency.max_delay))
        agreement = NormAgreement(ask)
        pulled = await self.membership.guard(_gather(agreement.bring(index, partial(get, index)) for index in indices))
        self.grad_norm = agreement.norm
        return pulled

    def _note_results(self, round_: Round, pulled: Sequence[Pulled]) -> None:
        """Note the outcome of the rounds that a pull reports: applied or skipped."""
        max_delay = self.joined.consistency.max_delay
        skipped = {told: ranks for one in pulled for told, ranks in one.skipped.items()}
        if not max_delay and round_ >= self._pushed_round:  # else the next one is on its way
            self.feedback.resolve(is_applied=round_ not in skipped)
        if round_ in skipped:
            self.grad_norm = None if self.max_grad_norm is None else math.nan
        fresh = sorted(skipped.keys() - set(self.outcomes.skipped))
        scaler = next((one.scaler for one in pulled if one.scaler is not None), None)
        self.outcomes = self.outcomes.advance(skipped, scaler, newest=round_, keep=2 * max_delay + 2)
        for told in fresh:
            self.metrics.skipped.inc()
            names = ", ".join(f"trainer {rank}" for rank in sorted(skipped[told]))
            self.log.warning(f"round {told} was skipped on all pservers: NaN or infinity in gradients of {names}")

    async def pull_buffers(self, memory: Mapping[str, memoryview]) -> None:
        """Fetch all buffers of the run (name -> writable bytes)."""
        owned: dict[int, dict[str, memoryview]] = {}
        for spec in self.plan.buffers:
            owned.setdefault(spec.pserver, {})[spec.name] = memory[spec.name]
        await self.membership.guard(_gather(self.pservers[i].get_buffers(wanted) for i, wanted in owned.items()))

    async def ask_all(self, ask: Callable[[PserverClient], Coroutine[Any, Any, T]]) -> list[T]:
        """Call `ask` for all pservers concurrently, and return the results in the order of their indices."""
        return await self.membership.guard(_gather(ask(pserver) for pserver in self.pservers))


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently, and return their results. The first error cancels the rest, and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
