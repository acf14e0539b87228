"""A pserver without sockets: its real endpoints, shard and compute thread, driven through ASGI piece by piece."""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.errors import GradpostError, StaleRun
from ps_protocol.fence import Fence
from ps_protocol.frames import FrameLimits, encode_header, parse_frame
from ps_protocol.membership import Freeze, FrozenRounds, InstallMembers, InstallRun, Membership, PserverRegistered
from ps_protocol.norms import AgreedNorm
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.requests import (
    BARRIER_HEADER,
    COMPUTED_ON_KEY,
    HAVE_HEADER,
    HYPER_PARAMETERS_KEY,
    NORM_HEADER,
    NUM_BLOCKS_KEY,
    WAIT_HEADER,
    NormAnswer,
)
from ps_protocol.vocabulary import PROTOCOL_VERSION, ParameterSpec, Round
from ps_protocol.wire_types import UNCHANGED, WireTypes
from services.pserver.durable.disk import Disk
from services.pserver.endpoints import TensorEndpoints
from services.pserver.inspection import digest_run
from services.pserver.metrics import PserverMetrics
from services.pserver.pserver import Pserver
from services.pserver.shard.bodies import InFlight
from services.runtime.compute import ComputeExecutor
from services.runtime.gate import current_request, reasons

from .oracle import Options, TorchOracle, assert_same_bits, make_numbers, make_options, make_spec

PARAMETERS = [ParameterSpec(f"p{i}", (size,)) for i, size in enumerate((1, 5, 64, 130))]
GROUPS = [make_options("SGD", momentum=0.9)]
LIMITS = FrameLimits()

Pause = Callable[[], Awaitable[None]]


def initial_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {p.name: torch.randn(p.shape, generator=generator) for p in PARAMETERS}


def gradients_of(rank: int, round_: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return {p.name: torch.randn(p.shape, generator=generator) for p in PARAMETERS}


def encode(blocks: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A frame of flat float32 tensors by block name."""
    header = encode_header([(name, "F32", tuple(t.shape)) for name, t in blocks.items()], metadata)
    return header + b"".join(t.numpy().tobytes() for t in blocks.values())


def decode(body: bytes) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Blocks and metadata of a reply."""
    frame = parse_frame(body)
    data = bytearray(body[frame.data_begin :])
    blocks = {
        e.name: torch.frombuffer(data, dtype=torch.float32, count=e.shape[0], offset=e.begin) for e in frame.tensors
    }
    return blocks, frame.metadata


class Upload:
    """An ASGI `receive`: the body in pieces, with `pause` before each. `ends=False`: the client goes away instead."""

    def __init__(self, body: bytes, *, num_pieces: int = 1, pause: Pause | None = None, ends: bool = True) -> None:
        size = max(1, -(-len(body) // num_pieces))
        self._pieces = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        self._pause = pause
        self._ends = ends

    async def __call__(self) -> dict[str, Any]:
        if self._pause is not None:
            await self._pause()
        if not self._pieces:
            return {"type": "http.disconnect"}
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces) or not self._ends}


class Halfway:
    """A pause that stops an upload before its last byte: `await reached`, change the world, `go.set()`."""

    def __init__(self) -> None:
        self._num_calls = 0
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls == 2:
            self.reached.set()
            await self.go.wait()


@dataclass
class Bench:
    """One pserver that serves one run, and requests to it. A refusal is raised as the endpoint raises it."""

    pserver: Pserver
    compute: ComputeExecutor
    endpoints: TensorEndpoints
    registry: CollectorRegistry
    plan: SlicePlan
    install: InstallRun
    groups: Sequence[Options] = field(default_factory=lambda: GROUPS)

    @property
    def run(self) -> Any:
        return self.pserver.run

    def fence(self, rank: int, round_: int, **changes: Any) -> Fence:
        fence = Fence(
            protocol=PROTOCOL_VERSION, run=self.install.run, attempt=self.install.attempt, plan=self.plan.digest,
            pserver=0, pserver_incarnation=self.install.incarnation,
            rank=rank, trainer_incarnation=self.install.membership.members.get(rank, 1), round=round_,
        )  # fmt: skip
        return fence._replace(**changes)

    # ------------------------------------------------------------ requests

    async def call(
        self,
        endpoint: str,
        fence: Fence,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        upload: Upload | None = None,
    ) -> bytes:
        """Return the body of the answer."""
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        pairs = {**fence.to_headers(), "content-length": str(len(body)), **(headers or {})}
        scope = {
            "type": "http",
            "http_version": "2",
            "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
        }
        try:
            await getattr(self.endpoints, endpoint)(scope, upload or Upload(body), send)
        except asyncio.CancelledError:
            if (error := reasons.pop(current_request(), None)) is not None:
                raise error from None
            raise
        assert sent[0]["status"] == 200
        return b"".join(message["body"] for message in sent[1:])

    async def push(
        self,
        rank: int,
        round_: int,
        blocks: Mapping[str, Tensor] | None = None,
        *,
        last: bool = True,
        upload: Callable[[bytes], Upload] | None = None,
        groups: Sequence[Options] | None = None,
        fence: Fence | None = None,
        computed_on: int | None = None,
    ) -> dict[str, Any]:
        """Push one bucket; by default the whole contribution of this trainer in this round."""
        if blocks is None:
            blocks = self.contribution(rank, round_)
        is_async = self.install.consistency.is_async
        metadata = self.completion(groups, len(blocks) if is_async else None) if last else None
        if metadata is not None and is_async:
            metadata[COMPUTED_ON_KEY] = str(round_ - 1 if computed_on is None else computed_on)
        body = encode(blocks, metadata)
        answer = await self.call(
            "push", fence or self.fence(rank, round_), body, upload=upload(body) if upload else None
        )
        return json.loads(answer)

    async def barrier(self, rank: int, round_: int, kind: str = "batch", **changes: Any) -> dict[str, Any]:
        fence = self.fence(rank, round_, **changes)
        return json.loads(await self.call("barrier", fence, headers={BARRIER_HEADER: kind}))

    async def get(
        self,
        rank: int,
        round_: int,
        wait_seconds: float = 10,
        *,
        names: Sequence[str] = (),
        with_barrier: bool = False,
        have: Round | None = None,
        norm: AgreedNorm | None = None,
        **changes: Any,
    ) -> bytes:
        headers = {WAIT_HEADER: str(wait_seconds), **({BARRIER_HEADER: "batch"} if with_barrier else {})}
        if have is not None:
            headers[HAVE_HEADER] = str(have)
        if norm is not None:
            headers[NORM_HEADER] = norm.to_header()
        body = json.dumps(list(names)).encode() if names else b""
        return await self.call("pull", self.fence(rank, round_, **changes), body, headers=headers)

    async def norm(
        self, rank: int, round_: int, wait_seconds: float = 10, *, with_barrier: bool = True, **changes: Any
    ) -> NormAnswer:
        headers = {WAIT_HEADER: str(wait_seconds), **({BARRIER_HEADER: "batch"} if with_barrier else {})}
        return NormAnswer.model_validate_json(
            await self.call("norm", self.fence(rank, round_, **changes), headers=headers)
        )

    def contribution(self, rank: int, round_: int) -> dict[str, Tensor]:
        return {f"{name}.block0": gradient for name, gradient in gradients_of(rank, round_).items()}

    def completion(self, groups: Sequence[Options] | None = None, num_blocks: int | None = None) -> dict[str, str]:
        """Metadata of a contribution's last push."""
        assert self.plan.optimizer is not None
        numbers = make_numbers(self.plan.optimizer, groups or self.groups)
        count = len(self.plan.blocks) if num_blocks is None else num_blocks
        return {NUM_BLOCKS_KEY: str(count), HYPER_PARAMETERS_KEY: json.dumps(numbers)}

    async def upload_initial(self) -> None:
        blocks = {f"{name}.block0": value for name, value in initial_values().items()}
        await self.call("initial", self.fence(self.install.uploader, 0), encode(blocks))
        await self._wait_for_writer()

    async def wait_until_published(self) -> None:
        """Wait for the running apply, and for the snapshots that are being written and published."""
        await self.run.wait_for_apply()
        await self._wait_for_writer()

    async def _wait_for_writer(self) -> None:
        writer = self.run.writer
        await writer.wait_for_writes()
        if writer._publishing is not None:
            await asyncio.wait([writer._publishing])

    async def play_round(self, round_: int, ranks: Sequence[int] | None = None) -> bytes:
        """One whole round of these trainers, in order; the bytes of its version."""
        ranks = sorted(self.run.schedule.members) if ranks is None else ranks
        for rank in ranks:
            await self.push(rank, round_)
        for rank in ranks:
            await self.barrier(rank, round_)
        [reply] = {await self.get(rank, round_) for rank in ranks}
        return reply

    async def play_rounds(self, first: int, last: int) -> None:
        for round_ in range(first, last + 1):
            await self.play_round(round_)

    # ------------------------------------------------------------ the coordinator

    async def change_members(
        self, number: int, members: Mapping[int, int], failure: Any = None, **membership: Any
    ) -> None:
        changed = Membership(dict(members), **membership)
        await self.pserver.install_members(
            InstallMembers(run=self.install.run, attempt=0, number=number, membership=changed, failure=failure)
        )

    async def freeze(self, number: int) -> FrozenRounds:
        return await self.pserver.freeze(Freeze(run=self.install.run, attempt=0, number=number))

    async def install_next_run(self, name: str = "run2", **changes: Any) -> InstallRun:
        install = self.install.model_copy(update={"run": name, **changes})
        await self.pserver.install_run(install)
        return install

    # ------------------------------------------------------------ looking

    async def digest(self) -> str:
        return await digest_run(self.run)

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    async def settle_used_bytes(self, expected: int) -> int:
        """Bytes of receive buffers that are in use; what only garbage holds is not."""
        await asyncio.sleep(0)  # the loop itself holds the task that has just woken this one
        if self.pserver.pool.used_bytes != expected:
            gc.collect()
        return self.pserver.pool.used_bytes


def make_pserver(state_dir: Path, compute: ComputeExecutor, registry: CollectorRegistry) -> Pserver:
    in_flight = InFlight(LIMITS.max_body_bytes)
    return Pserver(compute, PserverMetrics(registry, compute), LIMITS, in_flight, Disk(state_dir))


@asynccontextmanager
async def bench(
    num_trainers: int = 2,
    *,
    initial: bool = True,
    groups: Sequence[Options] = GROUPS,
    parameters: Sequence[ParameterSpec] = PARAMETERS,
    optimizer: str = "SGD",
    state_dir: Path | None = None,
    incarnation: int = 1,
    wire: WireTypes = UNCHANGED,
    buffers: Sequence[tuple[str, tuple[int, ...], str]] = (),
    **install: Any,
) -> AsyncIterator[Bench]:
    """A pserver with a run. At the end nothing may be left: no task, no job.

    With `state_dir` it goes on with what an earlier one has left there, which ended as if it had been killed.
    """
    compute = ComputeExecutor()
    registry = CollectorRegistry()
    folder = tempfile.TemporaryDirectory()
    pserver = make_pserver(state_dir or Path(folder.name), compute, registry)
    held = await pserver.open_folder(0)
    await pserver.adopt_identity(PserverRegistered(index=0, incarnation=incarnation, lease_seconds=10))
    plan = make_plan(parameters, 1, optimizer=make_spec(optimizer, groups), wire=wire, buffers=buffers)
    message = InstallRun(
        **{
            "run": "run1",
            "attempt": 0,
            "plan": plan.as_json,
            "incarnation": incarnation,
            "restore": held.rounds.applied if held else None,
            "consistency": Consistency(),
            "nonfinite": "reject",
            "patience_seconds": 60,
            "uploader": 0,
            "number": 1,
            "membership": Membership(dict.fromkeys(range(num_trainers), 1)),
            **install,
        }
    )
    bench = Bench(pserver, compute, TensorEndpoints(pserver), registry, plan, message, groups)
    try:
        await pserver.install_run(message)
        if initial and held is None:
            await bench.upload_initial()
        yield bench
        await asyncio.sleep(0)
        if message.consistency.is_async:
            await bench.run.end(StaleRun("the test is over"))  # its workers live as long as the run
        if state_dir is not None:
            await bench.run.close(StaleRun("the test is over"))
        own, left = asyncio.current_task(), set[Any]()
        for _ in range(1000):  # an apply may still run, or a snapshot be published
            left = asyncio.all_tasks() - {own}
            if not left and not compute.num_jobs:
                break
            await asyncio.sleep(0.001)
        assert not left, f"tasks that wait for ever: {left}"
    finally:
        compute.close()
        pserver.disk.close()
        folder.cleanup()


@dataclass(frozen=True)
class Refusal:
    """The text of an error without its traceback, which would keep the request's frames and its body."""

    text: str
    facts: dict[str, Any]


async def refused(code: str, request: Awaitable[object]) -> Refusal:
    try:
        await request
    except GradpostError as caught:
        if caught.code == code:
            return Refusal(str(caught), caught.facts)
        raise
    pytest.fail(f"expected {code}")


async def unchanged(b: Bench, code: str, request: Coroutine[Any, Any, object]) -> Refusal:
    """The request is refused and changes nothing, not even what memory is in use."""
    digest, used = await b.digest(), b.pserver.pool.used_bytes
    refusal = await refused(code, request)
    assert await b.digest() == digest
    assert await b.settle_used_bytes(used) == used
    return refusal


async def keep_busy(b: Bench) -> Callable[[], Awaitable[None]]:
    """Occupy the compute thread; returns what frees it again."""
    begun, free = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert free.wait(10)

    job = asyncio.create_task(b.compute.run(wait))
    while not begun.is_set():  # noqa: ASYNC110 - it is set on another thread
        await asyncio.sleep(0.001)

    async def release() -> None:
        free.set()
        await job

    return release


def begin_push(b: Bench, rank: int, round_: int, **arguments: Any) -> tuple[asyncio.Task[Any], Halfway]:
    """A push whose last bytes do not come before `go` is set."""
    halfway = Halfway()
    push = b.push(rank, round_, upload=lambda body: Upload(body, num_pieces=2, pause=halfway), **arguments)
    return asyncio.create_task(push), halfway


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that has no event, such as a metric."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def hold(
    patch: pytest.MonkeyPatch, owner: object, method: str, *, after: bool = False
) -> tuple[threading.Event, threading.Event]:
    """Hold calls of a method on other threads; the events say that one has begun, or ended, and that it may go on."""
    real, is_there, may_go_on = getattr(owner, method), threading.Event(), threading.Event()

    def held(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options) if after else None
        is_there.set()
        assert may_go_on.wait(10)
        return result if after else real(*arguments, **options)

    patch.setattr(owner, method, held)
    return is_there, may_go_on


def failing(error: Exception) -> Callable[..., Any]:
    """Return a function that raises this error."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def assert_equals_oracle(values: Mapping[str, Tensor], oracle: TorchOracle) -> None:
    """Compare the values of blocks with the parameters of one process, bit for bit."""
    for name, parameter in oracle.parameters.items():
        assert_same_bits(values[f"{name}.block0"], parameter.detach(), name)
