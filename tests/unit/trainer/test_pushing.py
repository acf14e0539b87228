"""Gradients on their way to pservers, and copies between a device and the host."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadModel, ContributionConflict, GradpostError, NonFiniteGradient
from ps_protocol.frames import Frame, parse_frame
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.requests import NUM_BLOCKS_KEY, Barrier, Completion
from ps_protocol.vocabulary import NonfinitePolicy, ParameterSpec
from ps_protocol.wire_types import PushType, WireTypes
from trainer_client.client.buckets import FrameParts, make_buckets
from trainer_client.client.error_feedback import ErrorFeedback
from trainer_client.client.pserver_group import DeclaredRun, PserverGroup
from trainer_client.client.telemetry import TrainerMetrics
from trainer_client.engines.engine import StepGradients
from trainer_client.engines.step_exchange import StepExchange
from trainer_client.engines.step_memory import StepMemory
from trainer_client.engines.unfinished_step import UnfinishedStep
from trainer_client.transport.device_copies import GradientCopies, ParameterCopies
from trainer_client.transport.exchange import Exchange
from trainer_client.transport.tensors import Flattening
from trainer_client.transport.work import Work

from .driving import THREADS, exchange_on


def plan_of(sizes: dict[str, int], num_pservers: int = 1, **options: object) -> SlicePlan:
    specs = [ParameterSpec(name, (size,)) for name, size in sizes.items()]
    return make_plan(specs, num_pservers, **options)  # type: ignore[arg-type]


def read(frame: Frame, body: bytes) -> dict[str, Tensor]:
    """Return the float32 tensors of a frame."""
    begin = frame.data_begin
    data = {entry.name: bytearray(body[begin + entry.begin : begin + entry.end]) for entry in frame.tensors}
    return {name: torch.frombuffer(its, dtype=torch.float32) for name, its in data.items()}


# ---------------------------------------------------------------- flat gradients


def test_only_gradients_of_sparse_parameters_stay_sparse_and_must_be() -> None:
    warnings: list[str] = []
    flattening = Flattening({"table"}, {"of Adam": "Adam"}, warnings.append)
    values = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    twice = torch.sparse_coo_tensor([[2, 0, 2]], values, (3, 2), check_invariants=True)
    kept = flattening.flat("table", twice)
    assert (kept.indices().tolist(), kept.values().tolist()) == ([[0, 2]], [[3.0, 4.0], [6.0, 8.0]])
    for _ in range(2):
        assert flattening.flat("unknown", twice).tolist() == [3.0, 4.0, 0.0, 0.0, 6.0, 8.0]
    [warning] = warnings
    assert "'unknown' is pushed as a dense one" in warning
    with pytest.raises(BadModel, match=r"Adam does not support sparse gradients, such as that of .* Use SparseAdam"):
        flattening.flat("of Adam", twice)
    for other in (torch.ones(3, 2), torch.ones(3, 2).to_sparse()):  # neither names rows
        with pytest.raises(BadModel, match=r"'table' is not a sparse COO tensor of rows, .* and sparse=False"):
            flattening.flat("table", other)


# ---------------------------------------------------------------- buckets


def test_sparse_blocks_share_a_bucket_unless_all_their_rows_are_too_large() -> None:
    specs = [ParameterSpec(f"table{i}", (200_000, 64), is_sparse=True) for i in range(6)]  # 52 MB each, with indices
    [shard] = make_buckets(make_plan(specs, 1), bucket_bytes=1 << 20, feedback=ErrorFeedback())
    assert [len(bucket.entries) for bucket in shard] == [2, 2, 2]


def test_only_borrowed_gradients_are_sent_from_their_own_memory() -> None:
    plan = plan_of({"w": 50_000, "small": 3})
    [[bucket]] = make_buckets(plan, bucket_bytes=1 << 20, feedback=ErrorFeedback())
    flat = {"w": torch.zeros(50_000), "small": torch.zeros(3)}
    for borrow in (False, True, False):
        bucket.fill(flat, borrow=borrow)
        addresses = [int(np.frombuffer(part, np.uint8).ctypes.data) for part in bucket.frame()]
        assert (flat["w"].data_ptr() in addresses) == borrow


# ---------------------------------------------------------------- frames that leave

SIZES = {"first": 30, "second": 0, "third": 500, "fourth": 7, "fifth": 90}
NUM_PSERVERS = 2
PLAN = plan_of(SIZES, NUM_PSERVERS, min_block_size=100)


class Recorder(PserverGroup):
    """A group of pservers that records the frames that pushes and pulls bring to each."""

    def __init__(self, nonfinite: NonfinitePolicy = "reject", max_delay: int = 0) -> None:
        coordinator: Any = SimpleNamespace(joined=SimpleNamespace(consistency=Consistency(max_delay=max_delay)))
        run, unused = DeclaredRun(PLAN, nonfinite=nonfinite), cast("Any", None)
        super().__init__([], run, coordinator, unused, unused)
        self.pushed: list[list[tuple[Frame, bytes]]] = [[] for _ in range(NUM_PSERVERS)]
        self.is_finite: bool | None = None  # the verdict that a pull brought

    def push(self, round_: int, pserver: int, frame: FrameParts) -> Work[None]:
        yield 0.0
        self.record(pserver, frame)

    def record(self, pserver: int, frame: FrameParts) -> None:
        body = b"".join(frame)
        self.pushed[pserver].append((parse_frame(body), body))

    def pull(  # type: ignore[override] - without the memory of the values
        self, round_: int, _: object, *, barrier: Barrier, pushed: Sequence[FrameParts] = (), on_block: object
    ) -> Work[None]:
        yield 0.0
        self.is_finite = barrier.is_finite
        for pserver, frame in enumerate(pushed):
            self.record(pserver, frame)


@pytest.fixture(scope="module", params=THREADS)
def io(request: pytest.FixtureRequest) -> Iterator[Exchange]:
    with exchange_on(request.param) as io:
        yield io


def begin(
    io: Exchange,
    pservers: PserverGroup,
    *,
    bucket_bytes: int = 300,
    step: int = 1,
    previous: StepExchange | None = None,
) -> StepExchange:
    """Begin a step with parameters of its own."""
    client: Any = SimpleNamespace(
        io=io, pservers=pservers, metrics=TrainerMetrics(), run=DeclaredRun(PLAN), coordinator=SimpleNamespace(),
        joined=SimpleNamespace(consistency=Consistency()), settings=SimpleNamespace(chosen_bucket_bytes=bucket_bytes),
    )  # fmt: skip
    memory = StepMemory(client, {name: torch.zeros(size) for name, size in SIZES.items()})
    return StepExchange(client, step, memory, previous, borrow=True, arrivals=None)


@given(st.data())
def test_each_block_is_pushed_once_and_the_last_frame_has_their_number(io: Exchange, data: st.DataObject) -> None:
    present = data.draw(st.lists(st.sampled_from(sorted(SIZES)), unique=True), label="present, in order of arrival")
    num_early = data.draw(st.integers(0, len(present)), label="of them before step()")
    bucket_bytes = data.draw(st.sampled_from([1, 300, 1000, 1 << 20]), label="bucket_bytes")
    gradients = {name: torch.rand(SIZES[name]) for name in present}
    pservers = Recorder()
    step = begin(io, pservers, bucket_bytes=bucket_bytes)
    for name in present[:num_early]:
        step.add(name, gradients[name])
    step.complete(gradients, Completion(0, [{"lr": 0.5}]), is_finite=True)
    io.wait(step.started)
    assert pservers.is_finite

    pushed_blocks: Counter[str] = Counter()
    for shard, pushed in zip(PLAN.shards, pservers.pushed, strict=True):
        frames = [frame for frame, _ in pushed]
        [num_blocks] = [frame.metadata[NUM_BLOCKS_KEY] for frame in frames if NUM_BLOCKS_KEY in frame.metadata]
        assert int(num_blocks) == sum(len(frame.tensors) for frame in frames)
        assert all(frame.tensors for frame in frames if NUM_BLOCKS_KEY not in frame.metadata)
        blocks = {block.name: block for block in shard}
        for frame, body in pushed:
            for name, values in read(frame, body).items():
                pushed_blocks[name] += 1
                block = blocks[name]
                assert torch.equal(values, gradients[block.parameter][block.begin : block.end])
    assert pushed_blocks == {block.name: 1 for block in PLAN.blocks if block.parameter in gradients}


PRESENT = ["fifth", "fourth", "third", "first"]  # in the order of backward


def push_with_nan(io: Exchange, pservers: Recorder, num_early: int, bad: str, bucket_bytes: int) -> bool | None:
    """Push a step in which one gradient holds NaN, and return its verdict."""
    gradients = {name: torch.full((SIZES[name],), float(number)) for number, name in enumerate(PRESENT)}
    gradients[bad][SIZES[bad] // 2] = float("nan")
    step = begin(io, pservers, bucket_bytes=bucket_bytes)
    for name in PRESENT[:num_early]:
        step.add(name, gradients[name])
    try:
        step.complete(gradients, Completion(0, []), is_finite=True)
        io.wait(step.started)
    finally:
        step.give_up()
    return pservers.is_finite


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("bad", PRESENT)
def test_a_skipped_step_is_the_same_bytes_whenever_its_gradients_were_added(
    io: Exchange, bad: str, bucket_bytes: int
) -> None:
    seen = []
    for num_early in range(len(PRESENT) + 1):
        pservers = Recorder("skip_round")
        assert not push_with_nan(io, pservers, num_early, bad, bucket_bytes)
        seen.append([sorted(body for _, body in pushed) for pushed in pservers.pushed])
        for pushed in pservers.pushed:
            [num_blocks] = [frame.metadata[NUM_BLOCKS_KEY] for frame, _ in pushed if NUM_BLOCKS_KEY in frame.metadata]
            assert int(num_blocks) == sum(len(frame.tensors) for frame, _ in pushed)
            assert all(bool(values.isfinite().all()) for each in pushed for values in read(*each).values())
    assert seen == [seen[0]] * len(seen)


@pytest.mark.parametrize("bad", PRESENT)
def test_a_rejected_step_pushes_nothing_but_what_overlap_has_pushed(io: Exchange, bad: str) -> None:
    for num_early in range(len(PRESENT) + 1):
        pservers = Recorder()
        with pytest.raises(NonFiniteGradient, match=f"in the gradient of '{bad}' in round 1. To skip"):
            push_with_nan(io, pservers, num_early, bad, bucket_bytes=1)
        for frame, body in itertools.chain(*pservers.pushed):
            blocks = read(frame, body)
            assert {name.partition(".")[0] for name in blocks} <= {*PRESENT[:num_early]}
            assert all(bool(values.isfinite().all()) for values in blocks.values())
            assert NUM_BLOCKS_KEY not in frame.metadata
    assert push_with_nan(io, Recorder("allow"), 0, bad, bucket_bytes=1)  # nothing is read


@pytest.mark.parametrize(("row", "value"), [(1, 2.0), (2, 1.0)])
def test_the_next_try_of_an_interrupted_step_has_the_same_rows(row: int, value: float) -> None:
    def make(row: int, value: float) -> dict[str, Tensor]:
        return {"table": torch.sparse_coo_tensor([[row]], [[value]], (3, 1), is_coalesced=True, check_invariants=True)}

    unfinished = UnfinishedStep(leads_host=False)
    unfinished.contribution = StepGradients(make(1, 1.0), Completion(0, []), True)
    unfinished.note_failure(KeyboardInterrupt())
    unfinished.require_same_gradients(1, make(1, 1.0), ["table"])
    with pytest.raises(ContributionConflict, match=r"round 1.* its gradient of 'table', which differs"):
        unfinished.require_same_gradients(1, make(row, value), ["table"])


def test_a_rejected_try_of_a_step_leaves_the_errors_of_earlier_steps_as_they_were() -> None:
    pservers = Recorder(max_delay=1)
    plan = plan_of({"w": 300}, wire=WireTypes(push="int8"))
    [[bucket]] = make_buckets(plan, bucket_bytes=1 << 20, feedback=pservers.feedback)
    remainder = pservers.feedback.of(plan.blocks[0], "int8")
    for step in (1, 2):
        pservers.begin_pushes(step)
        bucket.fill({"w": torch.rand(300)})
    kept = remainder.kept.clone()
    assert kept.any()  # of step 1
    pservers.begin_pushes(2)
    assert torch.equal(remainder.kept, kept)
    assert not remainder.is_pending


@pytest.mark.parametrize("push", ["float32", "bfloat16", "int8", "topk"])
def test_nan_and_infinity_are_found_in_any_block_as_it_is_sent(push: PushType) -> None:
    sizes = {"small": 7, "large": 100_000, "tiny": 1, "absent": 9}
    plan = plan_of(sizes, wire=WireTypes(push=push))
    [[bucket]] = make_buckets(plan, bucket_bytes=1 << 20, feedback=ErrorFeedback())
    flat = {name: torch.zeros(size) for name, size in sizes.items()}
    for bad in (float("nan"), float("-inf")):
        flat["absent"].fill_(bad)
        bucket.fill(flat)
        assert bucket.find_nonfinite() == "absent"
        present = {name: gradient for name, gradient in flat.items() if name != "absent"}
        for name, gradient in present.items():
            bucket.fill(present, borrow=True)
            assert bucket.find_nonfinite() is None
            for at in (0, len(gradient) // 2, len(gradient) - 1):
                gradient[at] = bad
                bucket.fill(present, borrow=True)
                assert bucket.find_nonfinite() == name
                gradient[at] = 0.0
    flat["large"][3] = torch.finfo(torch.float32).max  # is rounded to infinity in bfloat16
    bucket.fill(present)
    assert bucket.find_nonfinite() == ("large" if push == "bfloat16" else None)


def test_nothing_is_pushed_after_a_step_that_failed(io: Exchange) -> None:
    class Refusing(Recorder):
        def push(self, round_: int, pserver: int, frame: FrameParts) -> Work[None]:
            yield 0.0
            raise GradpostError("it was refused")

    pservers, gradients = Recorder(max_delay=1), {"third": torch.rand(SIZES["third"])}
    failing = begin(io, Refusing(max_delay=1))
    failing.complete(gradients, Completion(0, []), is_finite=True)
    steps = [failing]
    for number in (2, 3):
        steps.append(begin(io, pservers, step=number, previous=steps[-1]))
        steps[-1].complete(gradients, Completion(0, []), is_finite=True)
    for step, reason in zip(steps, ["it was refused", *["the step before it failed"] * 2], strict=True):
        with pytest.raises(GradpostError, match=reason):
            io.wait(step.started)
    assert pservers.pushed == [[]] * NUM_PSERVERS


def test_a_failed_step_ends_once_no_push_reads_its_gradients(io: Exchange) -> None:
    ended: list[bool] = []

    class Refusing(Recorder):
        def push(self, round_: int, pserver: int, frame: FrameParts) -> Work[None]:
            try:
                while pserver == 0:
                    yield math.inf
                raise GradpostError("it was refused")
            finally:
                ended.append(True)

    step = begin(io, Refusing(max_delay=1), bucket_bytes=1 << 20)
    step.complete({"third": torch.rand(SIZES["third"])}, Completion(0, []), is_finite=True)
    with pytest.raises(GradpostError, match="it was refused"):
        io.wait(step.started)
    assert len(ended) == 2


# ---------------------------------------------------------------------- device copies


class Device:
    """A device module whose events happen when `done` is raised or an event is waited for."""

    def __init__(self) -> None:
        self.done = 0  # events that have happened
        self.recorded = 0
        self.waits: list[tuple[str, int]] = []  # which stream has to wait for which event

    def module(self, _: torch.device) -> Any:
        device = self

        class Event(torch.cpu.Event):
            def record(self, stream: Any = None) -> None:
                device.recorded += 1
                self.number = device.recorded

            def query(self) -> bool:
                return self.number <= device.done

            def synchronize(self) -> None:
                device.done = max(device.done, self.number)

        class Stream(torch.cpu.Stream):
            name = "side"

            def wait_event(self, event: Any) -> None:
                device.waits.append((self.name, event.number))

        main = Stream()
        main.name = "main"
        return SimpleNamespace(Event=Event, Stream=Stream, stream=torch.cpu.stream, current_stream=lambda _: main)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", device.module)
    return device


def test_gradients_arrive_in_order_each_after_what_made_it(device: Device) -> None:
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    copies.begin_copies(host, {"b": torch.ones(3)})
    copies.begin_copies(host, {"a": torch.full((2,), 2.0)})
    assert device.waits == [("side", 1), ("side", 3)]  # 2 and 4 are the ends of the copies
    assert list(copies.arrived()) == []
    device.done = 2
    assert [name for name, _ in copies.arrived()] == ["b"]
    copies.begin_copies(host, {"b": torch.zeros(3), "c": torch.ones(1)})
    assert [(name, copy.tolist()) for name, copy in copies.finish()] == [("a", [2.0, 2.0]), ("c", [1.0])]
    assert host["b"].tolist() == [1.0] * 3, "it was copied when it left"
    assert device.done == device.recorded


def test_copies_of_discarded_gradients_end_first(device: Device) -> None:
    """The script may write to the gradients' memory then."""
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    copies.begin_copies(host, {"a": torch.zeros(2)})
    copies.discard()
    assert device.done == device.recorded
    copies.begin_copies(host, {"a": torch.full((2,), 3.0)})
    assert [(name, copy.tolist()) for name, copy in copies.finish()] == [("a", [3.0, 3.0])]


@pytest.mark.parametrize("overlap_pulls", [False, True])
def test_a_parameter_is_written_between_two_computations(device: Device, overlap_pulls: bool) -> None:
    copies = ParameterCopies(overlap_pulls=overlap_pulls)
    parameter = torch.zeros(2, 2)
    copies.wait_for_copies({"w": parameter})
    marked = device.recorded
    torch.get_device_module(parameter.device).Event().record()  # something else is computed, on other parameters
    copies.copy(parameter, torch.ones(2, 2, dtype=torch.bfloat16).t())
    assert parameter.tolist() == [[1.0, 1.0]] * 2
    end = device.recorded
    assert device.waits == [("side", marked if overlap_pulls else end - 1), ("main", end)]
    assert device.done == 0
    copies.wait_for_copies({"w": parameter})
    assert device.done == end, "host memory is not written to before it was copied"
