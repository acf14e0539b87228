"""An asynchronous client for all pservers of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from structlog.typing import FilteringBoundLogger
from torch import Tensor

from ps_config.control_client import make_control_client
from ps_config.tokens import TokenPair
from ps_protocol.errors import BadInput, RolledBack
from ps_protocol.fence import Fence
from ps_protocol.frames import encode_header
from ps_protocol.messages import DeclareModel, PserverInfo, RunSummary, TrainerJoined
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.optimizers import HyperParameters, OptimizerSpec
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import (
    COMPUTED_ON_KEY,
    HYPER_PARAMETERS_KEY,
    NUM_BLOCKS_KEY,
    NUM_SLOTS_KEY,
)
from ps_protocol.vocabulary import (
    DTYPE_BYTES,
    PROTOCOL_VERSION,
    NonfinitePolicy,
    ParameterSpec,
    PserverIndex,
    Rank,
    Round,
)

from .destinations import Deltas
from .membership import Membership
from .metrics import MetricsServer, TrainerMetrics
from .pserver_client import PserverClient, Pulled
from .pserver_connection import PserverConnection
from .pushing.buckets import Bucket, Payload, make_buckets
from .pushing.encoding import ErrorFeedback
from .round_results import NormAgreement, Outcomes, finish_rounds
from .settings import TrainerSettings, read_settings
from .tensors import TORCH_DTYPES, writable_bytes
from .transport.exchange import Exchange

T = TypeVar("T")

# Settings that a trainer states with its model, so that they may still be chosen after it has joined.
_OF_THE_PLAN = {
    "min_block_size",
    "placement",
    "slice_parameters",
    "nonfinite",
    "push_type",
    "pull_type",
    "topk",
    "max_grad_norm",
}
_OF_LOCAL_STEPS = {"local_steps", "outer_lr", "outer_momentum", "outer_nesterov"}
_OF_OVERLAP = {"bucket_bytes", "overlap", "overlap_pulls", "accumulate_steps"}
DECLARED_SETTINGS = frozenset(_OF_THE_PLAN | _OF_LOCAL_STEPS | _OF_OVERLAP)
MAX_CONCURRENT_PUSHES = 4  # per pserver; more would only queue in the connection


class ParameterClient:
    """Joins a run and exchanges whole parameters with its pservers, by name.

    For use in `async` code that wants the parameter server without `RemoteOptimizer`; every method runs on the loop
    that `join` was awaited on. Tensors are copied on the way out, so the caller keeps its own. A round is

        await client.send(r, gradients)     # blocks of every gradient, to their pservers
        await client.batch_barrier(r)       # only after every pserver acknowledged every push
        values = await client.get(r)        # waits until all trainers' barriers are in and the round is applied
        await client.fetch_barrier(r)

    Every method raises the error that ended the run (`TrainerLost`, `RoundTimeout`, …) instead of waiting forever.
    """

    def __init__(self, coordinator: str | None = None, **arguments: Any) -> None:
        """Read the settings: `arguments` are those of `TrainerSettings`; None stands for `GRADPOST_*`."""
        self.settings: TrainerSettings = read_settings(coordinator=coordinator, **arguments)
        self.metrics = TrainerMetrics()
        self.joined: TrainerJoined
        self.plan: SlicePlan
        self.uploader: Rank
        self.pservers: list[PserverClient] = []
        self.is_declared = False  # all trainers have declared the same, and there is a plan
        self.unfinished: set[asyncio.Task[Any]] = set()  # steps that are on their way
        self.at_leave: list[Callable[[], None]] = []  # called once the run was left
        self._pushed_round: Round = 0  # the newest that something was pushed for
        self._begun_round: Round = 0  # the newest that some pserver may have counted this trainer in
        self._is_finite = True  # the gradient that was sent last
        self.feedback = ErrorFeedback()
        self.outcomes = Outcomes()
        self._sent_round: Round = 0  # the newest of which all pushes are acknowledged
        self._metrics_server: MetricsServer | None = None
        self._lag: asyncio.Task[None] | None = None
        token = self.settings.sent_token
        self._token = None if token is None else TokenPair(token, self._warn)
        self._control = make_control_client(self.settings.client_tls, self._token)
        self._bulk: dict[tuple[bool, str | None], Exchange] = {}
        self.start: Round = 1  # the first round that this trainer pushes for
        self.nonfinite: NonfinitePolicy = "reject"  # of the run
        self.rendezvous: str | None = None  # strategy ring: the address of the lowest rank
        self.max_grad_norm: float | None = None  # of the run
        self.grad_norm: float | None = None  # of the newest round, before it was clipped; NaN if that was skipped
        self.must_upload = False  # the initial values are this trainer's to push
        self.membership = Membership(self.settings, self._control)

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
                f"{', '.join(sorted(late))} cannot be set any more: pass it to connect(), before the trainer joins. "
                f"What may be set later is {', '.join(sorted(DECLARED_SETTINGS))}"
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
                await self._token.wait(settings.retry_seconds, self.log.info)
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
        self.membership.round, self.outcomes, self.grad_norm = round_, outcomes, grad_norm

    def _warn(self, line: str) -> None:
        self.log.warning(line)

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
                    min_block_size=settings.min_block_size,
                    placement=settings.placement,
                    slice_parameters=settings.slice_parameters,
                    nonfinite=settings.nonfinite,
                    push_type=settings.push_type,
                    pull_type=settings.pull_type,
                    topk=settings.topk,
                    local_steps=settings.local_steps,
                    max_grad_norm=settings.max_grad_norm,
                    aliases=dict(aliases or {}),
                    rendezvous=rendezvous,
                )
            )
        )
        self.plan = SlicePlan.from_json(ready.plan)
        self.uploader = ready.uploader
        self.must_upload = ready.uploader == self.joined.rank and ready.start == 1
        self.start, self.nonfinite, self.rendezvous = ready.start, ready.nonfinite, ready.rendezvous
        self.max_grad_norm = ready.max_grad_norm
        self.membership.round = ready.start - 1
        news = self.membership.news
        news.attempt = news.newest_attempt = ready.attempt
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
                news,
                retry_seconds=settings.retry_seconds,
                deadline_seconds=self.joined.round_timeout_seconds + 30,
            )
            self.pservers.append(PserverClient(connection, max_delay=self.joined.consistency.max_delay))
        links = self.membership.links = {pserver.index: pserver.link for pserver in self.pservers}
        self.metrics.local_pservers.set_function(lambda: sum(link.is_local for link in links.values()))
        self.is_declared = True
        if ready.start > 1:
            text = f"continuing run {ready.run} at round {ready.start - 1}"
            self.log.info(f"{text}: a script that counts its own steps begins there")
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
        self._pushed_round = self._begun_round = self._sent_round = self.membership.round = news.resume
        self.must_upload = news.uploader == self.joined.rank
        return news.resume

    def begin_round(self, round_: Round) -> None:
        """Note that pservers may count this trainer in the round: leaving before its end is a failure."""
        self._begun_round = round_

    async def finish(self) -> None:
        """Wait until every step that has begun is pulled, or has failed."""
        if self.unfinished:
            await asyncio.wait(self.unfinished)

    async def leave(self, outcome: str = "done", reason: str = "") -> None:
        """Leave the run, `done` or `failed`, and close all connections.

        Leaving in the middle of a round counts as failed, because only some pservers may have counted this trainer. In
        asynchronous modes a step is over once its pushes are acknowledged.
        """
        over = self._sent_round if self.is_declared and self.joined.consistency.is_async else 0
        if outcome == "done" and self._begun_round > max(over, self.membership.round):
            outcome, reason = "failed", f"it left in the middle of round {self._begun_round}"
        await self.membership.leave(outcome, reason)
        for close in self.at_leave:
            close()
        await self._control.aclose()
        for exchange in self._bulk.values():
            await exchange.aclose()
        if self._lag is not None:
            self._lag.cancel()
        if self._metrics_server is not None:
            self._metrics_server.close()

    async def __aenter__(self) -> ParameterClient:
        await self.join()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.leave("done" if error is None else "failed", "" if error is None else repr(error))

    async def summary(self) -> RunSummary:
        """Return the results of the run, as the services know them."""
        return await self.membership.summary()

    # ------------------------------------------------------------------ whole parameters

    async def send_initial(self, values: Mapping[str, Tensor]) -> None:
        """Upload the initial values of all parameters and buffers; only the elected uploader may."""
        parameters = self._flatten({name: values[name] for name in self.plan.parameter})
        buckets = make_buckets(self.plan, bucket_bytes=self.settings.chosen_bucket_bytes)
        for bucket in (b for shard in buckets for b in shard):
            bucket.fill(parameters)
        pushes = [
            self._push_all(pserver, 0, [b.frame() for b in shard], initial=True)
            for pserver, shard in zip(self.pservers, buckets, strict=True)
        ]
        for spec in self.plan.buffers:
            header = encode_header([(spec.name, spec.dtype, spec.shape)])
            data = values[spec.name].detach().to("cpu").contiguous()
            frame = memoryview(header), writable_bytes(data)
            pushes.append(self._push_all(self.pservers[spec.pserver], 0, [frame], initial=True))
        await self.membership.guard(_gather(pushes))

    async def send(
        self, round_: Round, gradients: Mapping[str, Tensor], hyper_parameters: list[HyperParameters]
    ) -> None:
        """Push the gradients of one round (parameter name -> tensor of its shape and dtype), block by block.

        A parameter that is left out has no gradient in this round. Returns when every pserver has acknowledged
        every push; the batch barrier may follow.
        """
        flat = self._flatten(gradients)
        self._pushed_round = self._begun_round = round_
        buckets = make_buckets(self.plan, bucket_bytes=self.settings.chosen_bucket_bytes, feedback=self.feedback)
        pushes = []
        for pserver, shard in zip(self.pservers, buckets, strict=True):
            for bucket in shard:
                bucket.fill(flat)
            computed_on = self.membership.round if self.joined.consistency.is_async else None
            metadata = completion(shard, hyper_parameters, computed_on)
            frames = [b.frame() for b in shard[:-1] if b.present] + [shard[-1].frame(metadata)]
            pushes.append(self._push_all(pserver, round_, frames))
        answers = await self.membership.guard(_gather(pushes))
        self._is_finite = all(answers)
        self._sent_round = round_

    async def batch_barrier(self, round_: Round) -> None:
        """Report to every pserver that this trainer's contribution is complete. Asynchronous modes have no barrier."""
        if self.joined.consistency.is_async:
            return
        await self.ask_all(lambda pserver: pserver.barrier(round_, "batch", is_finite=self._is_finite))

    async def get(self, round_: Round, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Wait for version `round_` and return parameters by name, newly allocated; all of them without `names`."""
        specs = [self.plan.parameter[name] for name in (self.plan.parameter if names is None else names)]
        dtypes = {spec.name: TORCH_DTYPES[self.plan.pulled(spec.name)] for spec in specs}
        values = {spec.name: torch.empty(spec.shape, dtype=dtypes[spec.name], device="cpu") for spec in specs}
        destinations = self.destinations({name: writable_bytes(tensor) for name, tensor in values.items()})

        async def fetch(index: int, norm: AgreedNorm | None) -> Pulled:
            wanted = destinations[index]
            return await self.pservers[index].get(
                round_, wanted, norm=norm, names=() if names is None else list(wanted)
            )

        indices = [index for index, wanted in enumerate(destinations) if wanted or names is None]
        pulled = await self._fetch_all(round_, indices, fetch)
        self._note_results(round_, pulled)
        if names is None:
            self.membership.round = max(self.membership.round, round_)
        return {spec.name: values[spec.name].to(TORCH_DTYPES[spec.dtype]) for spec in specs}

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

    async def fetch_barrier(self, round_: Round) -> None:
        """Report to every pserver that this version was read; any message for a later round implies it.

        Asynchronous modes have no barrier.
        """
        if self.joined.consistency.is_async:
            return
        await self.ask_all(lambda pserver: pserver.barrier(round_, "fetch"))
        self.membership.round = max(self.membership.round, round_)

    def _flatten(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = {}
        for name, tensor in tensors.items():
            spec = self.plan.parameter[name]
            tensor = torch.as_tensor(tensor, device="cpu").detach()
            if tuple(tensor.shape) != spec.shape:
                raise BadInput(
                    f"tensor for {name!r}", code="wrong_shape", expected=list(spec.shape), actual=list(tensor.shape)
                )
            if tensor.dtype != TORCH_DTYPES[spec.dtype]:
                raise BadInput(
                    f"tensor for {name!r}", code="wrong_dtype", expected=spec.dtype, actual=str(tensor.dtype)
                )
            flat[name] = tensor.reshape(-1)
        return flat

    # ------------------------------------------------------------------ callers with their own buffers

    def destinations(self, memory: Mapping[str, memoryview]) -> list[dict[str, memoryview]]:
        """Return for each pserver the memory of its blocks (name -> bytes) within that of whole parameters."""
        result: list[dict[str, memoryview]] = []
        for shard in self.plan.shards:
            wanted = {}
            for block in shard:
                if block.parameter in memory:
                    size = DTYPE_BYTES[self.plan.pulled(block.parameter)]
                    wanted[block.name] = memory[block.parameter][block.begin * size : block.end * size]
            result.append(wanted)
        return result

    def make_deltas(self, destinations: Sequence[Mapping[str, memoryview]]) -> list[Deltas] | None:
        """Return memory for the deltas of these destinations, for each pserver; None if the run does not pull deltas.

        The destinations must be flat float32 memory that keeps the pulled values as long as `have` names their version.
        """
        if not self.plan.wire.pulls_deltas:
            return None
        plan = self.plan
        rounded = {b.name for b in plan.blocks if plan.pulled(b.parameter) == "F32" and b.parameter not in plan.means}
        return [Deltas({name: data for name, data in one.items() if name in rounded}) for one in destinations]

    async def pull(
        self,
        round_: Round,
        destinations: Sequence[Mapping[str, memoryview]],
        *,
        with_batch_barrier: bool,
        is_finite: bool = True,
        have: Sequence[Round] | None = None,
        deltas: Sequence[Deltas] | None = None,
        on_block: Callable[[str], None] | None = None,
    ) -> list[Round]:
        """Wait for version `round_` of every shard and write it to `destinations`; the batch barrier may come with it.

        Returns the version of each shard. If its bytes stay as they are, it may be the `have` of the next pull, which
        then leaves out blocks that have not changed. Deltas need those of `make_deltas`. `is_finite` is True if every
        pserver found this trainer's gradient finite. Without deltas `on_block` is called with the name of each complete
        block.
        """

        async def fetch(index: int, norm: AgreedNorm | None) -> Pulled:
            return await self.pservers[index].get(
                round_,
                destinations[index],
                with_batch_barrier=with_batch_barrier,
                is_finite=is_finite,
                norm=norm,
                have=None if have is None else have[index],
                deltas=None if deltas is None else deltas[index],
                on_block=on_block,
            )

        pulled = await self._fetch_all(
            round_, range(len(self.pservers)), fetch, with_batch_barrier=with_batch_barrier, is_finite=is_finite
        )
        self._note_results(round_, pulled)
        self.membership.round = round_
        return [one.version for one in pulled]

    async def _fetch_all(
        self,
        round_: Round,
        indices: Sequence[PserverIndex],
        fetch: Callable[[PserverIndex, AgreedNorm | None], Coroutine[Any, Any, Pulled]],
        *,
        with_batch_barrier: bool = False,
        is_finite: bool = True,
    ) -> list[Pulled]:
        """Call `fetch` for these pservers, with the round's norm if gradients are clipped.

        The batch barrier comes with the request for the norm.
        """
        if self.max_grad_norm is None or round_ == 0:
            return await self.membership.guard(_gather(fetch(index, None) for index in indices))

        async def ask() -> list[ShardNorm | None]:
            return await _gather(
                pserver.norm(round_, with_batch_barrier=with_batch_barrier, is_finite=is_finite)
                for pserver in self.pservers
            )

        if round_ == self.start - 1:
            await self.membership.guard(finish_rounds(self.pservers, round_, self.joined.consistency.max_delay))
        agreement = NormAgreement(ask)
        pulled = await self.membership.guard(
            _gather(agreement.bring(index, partial(fetch, index)) for index in indices)
        )
        self.grad_norm = agreement.norm
        return pulled

    async def pull_buffers(self, memory: Mapping[str, memoryview]) -> None:
        """Fetch all buffers of the run (name -> writable bytes)."""
        owned: dict[int, dict[str, memoryview]] = {}
        for spec in self.plan.buffers:
            owned.setdefault(spec.pserver, {})[spec.name] = memory[spec.name]
        await self.membership.guard(_gather(self.pservers[i].get_buffers(wanted) for i, wanted in owned.items()))

    async def push(self, round_: Round, pserver: PserverIndex, frame: Payload) -> bool:
        """Push one frame, whose memory must not change until this returns; True if the pserver found it finite."""
        self._pushed_round = round_
        answer = await self.membership.guard(self.pservers[pserver].push(round_, frame))
        return answer.finite

    async def _push_all(
        self, pserver: PserverClient, round_: Round, frames: Sequence[Payload], *, initial: bool = False
    ) -> bool:
        limit = asyncio.Semaphore(MAX_CONCURRENT_PUSHES)

        async def push(frame: Payload) -> bool:
            async with limit:
                return (await pserver.push(round_, frame, initial=initial)).finite

        return all(await _gather(push(frame) for frame in frames))

    async def ask_all(self, ask: Callable[[PserverClient], Coroutine[Any, Any, T]]) -> list[T]:
        """Return the answers of all pservers, which are asked concurrently, in the order of their indices."""
        return await self.membership.guard(_gather(ask(pserver) for pserver in self.pservers))


def completion(
    shard: Sequence[Bucket],
    hyper_parameters: list[HyperParameters],
    computed_on: Round | None = None,
    num_slots: int = 0,
) -> dict[str, str]:
    """Return the metadata of a contribution's last push to a pserver: the number of blocks, and the hyperparameters.

    In asynchronous modes it names the step after which the trainer pulled the parameters of the gradient. `num_slots`
    is the number of slots and step states that belong to it.
    """
    metadata = {
        NUM_BLOCKS_KEY: str(sum(len(bucket.present) for bucket in shard)),
        HYPER_PARAMETERS_KEY: json.dumps(hyper_parameters, separators=(",", ":")),
    }
    if computed_on is not None:
        metadata[COMPUTED_ON_KEY] = str(computed_on)
    if num_slots:
        metadata[NUM_SLOTS_KEY] = str(num_slots)
    return metadata


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and return their results; the first error cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
