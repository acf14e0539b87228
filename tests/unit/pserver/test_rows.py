"""Sparse parameters: the bits of `torch.optim`, pulls of changed rows from any base, and refused pushes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.encodings import TORCH_DTYPES, Rows
from ps_protocol.frames import DEFAULT_LIMITS, encode_header, parse_frame
from ps_protocol.optimizers import MASTER, OptimizerSpec, slot_key
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.requests import COMPUTED_ON_KEY
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import ROWS, WireTypes
from services.pserver.run.read_pushes import PushReader
from services.pserver.shard import row_changes
from services.pserver.shard.bodies import Body, BufferPool, StagedBlock, check_blocks, split_blocks, view_bytes
from services.pserver.shard.optimizer import LoadedState
from services.pserver.shard.shard_state import reslice
from trainer_client.client.buckets import make_buckets
from trainer_client.client.error_feedback import ErrorFeedback
from trainer_client.transport.destinations import make_shard_destinations
from trainer_client.transport.frame_sink import FrameSink
from trainer_client.transport.tensors import Flattening, writable_bytes

from ...soaking import examples
from .oracle import (
    Options,
    Shards,
    TorchOracle,
    assert_equal,
    assert_same_bits,
    make_numbers,
    make_options,
    make_spec,
    num_threads,
)
from .support import bench, decode, encode, unchanged

Gradients = Mapping[str, Tensor]

# The rules of the sparse and of the dense parameters, and options of the sparse ones.
CASES: dict[str, tuple[str, str, Options]] = {
    "sgd": ("SGD", "SGD", {"lr": 0.1}),
    "sgd-maximize": ("SGD", "SGD", {"lr": 0.1, "maximize": True}),
    "adagrad": ("Adagrad", "Adagrad", {}),
    "adagrad-everything": ("Adagrad", "Adagrad", {
        "initial_accumulator_value": 0.5, "lr_decay": 0.1, "eps": 1e-6, "maximize": True}),
    "sparse-adam": ("SparseAdam", "Adam", {}),
    "sparse-adam-maximize": ("SparseAdam", "AdamW", {"betas": [0.8, 0.99], "eps": 1e-6, "maximize": True}),
}  # fmt: skip
PARAMETERS = [
    *(ParameterSpec(f"rows{width}", (40, width), is_sparse=True) for width in (1, 3, 8, 33)),
    ParameterSpec("flat", (50,), is_sparse=True),
    *(ParameterSpec(f"dense{i}", shape, group=1) for i, shape in enumerate([(7, 11), (130,), ()])),
]


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


def make_case(case: str, step: int = 0) -> tuple[OptimizerSpec, list[Options]]:
    """Return the spec of a group of sparse parameters and one of dense ones, and their options, which change."""
    sparse, dense, options = CASES[case]
    groups = [make_options(sparse, **options), make_options(dense)]
    specs = {name: make_spec(rule, [group]) for name, rule, group in zip("sd", (sparse, dense), groups, strict=True)}
    for group in groups:
        group["lr"] *= 1 + step / 7
    return OptimizerSpec.combine(specs), groups


def draw_gradients(step: int, rank: int, parameters: Sequence[ParameterSpec]) -> dict[str, Tensor]:
    """Return gradients as backward leaves them, with rows that come twice. Some have no rows, some are absent."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    gradients = {}
    for number, spec in enumerate(parameters):
        if (number + step) % 4 == rank:
            continue
        num_rows = 0 if (number + step) % 5 == 0 else 9
        ids = torch.randint(spec.shape[0] if spec.shape else 1, (num_rows,), generator=generator)
        gradients[spec.name] = make_gradient(spec, ids, generator)
    return gradients


def make_gradient(spec: ParameterSpec, ids: Tensor, generator: torch.Generator) -> Tensor:
    if not spec.is_sparse:
        return torch.randn(spec.shape, generator=generator).bfloat16().float()
    values = torch.randint(-64, 64, (len(ids), *spec.shape[1:]), generator=generator) / 64  # sums of few are exact
    return make_sparse(ids, values, spec.shape)


def make_sparse(ids: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=True)


def average_rows(contributions: Sequence[Gradients]) -> dict[str, Tensor]:
    """Return half of the promised mean, computed in numpy: of each row, or of a dense gradient as of its only row."""
    means: dict[str, Tensor] = {}
    for name in {name for gradients in contributions for name in gradients}:
        total: dict[int, np.ndarray] = {}
        found = [gradients[name] for gradients in contributions if name in gradients]
        for gradient in found:
            rows = gradient.coalesce() if gradient.is_sparse else gradient[None].to_sparse(1)
            for index, row in zip(rows.indices()[0].tolist(), rows.values().numpy(), strict=True):
                total[index] = total[index] + row if index in total else row
        ids, shape = sorted(total), found[0].shape
        mean = torch.from_numpy(np.array([total[i] * np.float32(0.5 / len(contributions)) for i in ids], np.float32))
        if found[0].is_sparse:
            values = mean.view(len(ids), *shape[1:])
            means[name] = make_sparse(torch.tensor(ids, dtype=torch.int64), values, shape).coalesce()
        else:
            means[name] = mean.view(shape)
    return means


def read(data: bytes, shards: Shards, index: int) -> dict[str, StagedBlock]:
    """Return the blocks of a push to one of the shards."""
    body = Body(BufferPool(), len(data))
    body.buffer[:] = data
    body.frame = parse_frame(body.buffer, DEFAULT_LIMITS)
    push = PushReader(shards.shards[index].layout, shards.plan).read(body)
    check_blocks(push.blocks.values())
    return dict(push.blocks)


class RowShards(Shards):
    """Shards that trainers push frames to, and half the gradient is applied. Copies are stepped from a log."""

    def __init__(self, plan: SlicePlan, initial: Mapping[str, Tensor]) -> None:
        super().__init__(plan, initial)
        self.replayed = Shards(plan, initial)
        self.squares: list[float] = []  # of the newest gradient, by shard, before it was halved
        self._buckets = make_buckets(plan, bucket_bytes=1 << 20, feedback=ErrorFeedback())
        self._flattening = Flattening({spec.name for spec in plan.parameters if spec.is_sparse})

    def step(self, contributions: Sequence[Gradients], groups: Sequence[Options]) -> None:
        numbers = make_numbers(self.plan.optimizer, groups)
        self.squares.clear()
        pushed: list[list[dict[str, StagedBlock]]] = [[] for _ in self.shards]
        for gradients in contributions:
            flat = {name: self._flattening.flat(name, gradient) for name, gradient in gradients.items()}
            for index, [bucket] in enumerate(self._buckets):
                bucket.fill(flat)
                pushed[index].append(read(b"".join(bucket.frame()), self, index))
        for shard, copy, blocks in zip(self.shards, self.replayed.shards, pushed, strict=True):
            gradient, present = shard.aggregator.aggregate(*split_blocks(blocks))
            self.squares.append(shard.aggregator.sum_of_squares(present))
            shard.aggregator.scale(0.5)
            logged = None if len(present) == len(shard.layout.places) else present
            data, num_rows = shard.aggregator.encode(logged)
            shard.apply(gradient, present, numbers)
            copy.apply(
                copy.aggregator.decode(memoryview(bytearray(b"".join(data))), logged, num_rows), present, numbers
            )
            assert copy.digest() == shard.digest()

    def load(self, value: float, groups: Sequence[Options]) -> None:
        """Take a step that loads masters, as after a trainer has loaded a checkpoint, and has no gradients."""
        for shard in (*self.shards, *self.replayed.shards):
            places = shard.layout.sparse
            masters = {slot_key(MASTER, each.name): torch.full((each.block.num_elements,), value) for each in places}
            numbers = make_numbers(self.plan.optimizer, groups)
            shard.apply(*shard.aggregator.aggregate([]), numbers, LoadedState({}, masters))

    def cut_otherwise(self, num_pservers: int, min_block_size: int) -> RowShards:
        """Return the same shards after the run was resumed with other pservers."""
        plan = make_plan(
            self.plan.parameters, num_pservers, min_block_size=min_block_size, optimizer=self.plan.optimizer
        )
        other = RowShards(plan, {spec.name: torch.zeros(spec.shape) for spec in plan.parameters})
        states = [(index, shard.state) for index, shard in enumerate(self.shards)]
        for index, shards in enumerate(zip(other.shards, other.replayed.shards, strict=True)):
            for shard in shards:
                shard.load_state(reslice(states, self.plan, plan, index))
        return other


def start(
    case: str, parameters: list[ParameterSpec], num_pservers: int, min_block_size: int, **plan: Any
) -> tuple[RowShards, TorchOracle]:
    spec, groups = make_case(case)
    generator = torch.Generator().manual_seed(7)
    initial = {p.name: torch.randn(p.shape, generator=generator) for p in parameters}
    cut = make_plan(parameters, num_pservers, min_block_size=min_block_size, optimizer=spec, **plan)
    return RowShards(cut, initial), TorchOracle(spec, parameters, groups, initial)


@pytest.mark.parametrize(
    ("case", "num_pservers", "min_block_size", "num_steps"),
    [
        *((case, number % 3 + 1, (60, 1, 8192)[number // 2], 30) for number, case in enumerate(CASES)),
        *(pytest.param(case, 3, 1, 1000, marks=pytest.mark.extended) for case in ("sgd", "adagrad", "sparse-adam")),
    ],
)
def test_rows_have_the_bits_of_torch(case: str, num_pservers: int, min_block_size: int, num_steps: int) -> None:
    # torch adds to a row of a 1-D parameter with another rounding than to one of a matrix, but not in SparseAdam
    parameters = [spec for spec in PARAMETERS if len(spec.shape) > 1 or not spec.is_sparse or "adam" in case]
    shards, oracle = start(case, parameters, num_pservers, min_block_size)
    for step in range(num_steps):
        if step == num_steps // 2:
            shards = shards.cut_otherwise(num_pservers % 3 + 1, 100)
        contributions = [draw_gradients(step, rank, parameters) for rank in range(3)]
        groups = make_case(case, step % 30)[1]
        shards.step(contributions, groups)
        means = average_rows(contributions)
        oracle.step(means, groups)
        assert sum(shards.squares) == pytest.approx(
            4 * sum(float(mean.double().pow(2).sum()) for mean in means.values())
        )
        if step % 7 == 0 or step == num_steps - 1:
            assert_equal(shards, oracle, f"after step {step}")


def test_trainers_that_count_their_own_steps_share_the_sums_of_adagrad() -> None:
    parameters = [ParameterSpec("rows", (5, 2), is_sparse=True), ParameterSpec("dense", (7,), group=1)]
    shards, oracle = start("adagrad", parameters, 1, 100)
    [shard] = shards.shards
    groups = [{**group, "initial_accumulator_value": 0.5} for group in make_case("adagrad")[1]]
    for state in (oracle.state(spec.name) for spec in parameters):
        state["sum"].fill_(0.5)
    for counter, row in ((0, 1), (0, 2), (1, 1), (0, 4), (1, 2)):
        values, dense = torch.full((1, 2), row / 3), torch.full((7,), row / 7)
        numbers = make_numbers(shards.plan.optimizer, groups)
        rows = {"rows.block0": Rows(torch.tensor([row]), values)}
        shard.apply_blocks({"dense.block0": dense}, numbers, rows, counter=counter)
        oracle.step({"rows": make_sparse(torch.tensor([row]), values, (5, 2)).coalesce(), "dense": dense}, groups)
        for name, parameter in oracle.parameters.items():
            assert_same_bits(shards.values(name), parameter, name)
            assert_same_bits(shards.values(name, "sum"), oracle.state(name)["sum"], f"sum of {name}")


class Reader:
    """A trainer's copy of the parameters, which pulls write to, and the bases that the pservers have sent with it."""

    def __init__(self, plan: SlicePlan) -> None:
        self.parameters = {
            spec.name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[plan.pulled(spec.name)]) for spec in plan.parameters
        }
        dense = {
            spec.name: writable_bytes(self.parameters[spec.name]) for spec in plan.parameters if not spec.is_sparse
        }
        self._destinations = make_shard_destinations(plan, dense)

    def pull(self, shards: Shards) -> int:
        """Pull all shards, and return the number of tensors that came."""
        num_tensors = 0
        for shard, destination in zip(shards.shards, self._destinations, strict=True):
            sink = FrameSink(destination.blocks, rows=destination.rows)
            for part in shard.encode_since(destination.base, {}):
                sink.feed(part)
            sink.finish()
            num_tensors += len(sink.names)
            destination.base = shard.changes.position
            for rows in destination.rows.values():
                rows.write_to(self.parameters[rows.parameter])
        return num_tensors

    def forget(self, base: int | None) -> None:
        for destination in self._destinations:
            destination.base = base


SPECS = [ParameterSpec("a", (40, 3), is_sparse=True), ParameterSpec("b", (7, 8), is_sparse=True), PARAMETERS[-1]]
ids = st.lists(st.integers(0, 39), max_size=12)
contributions = st.fixed_dictionaries({}, optional={"a": ids, "b": ids.map(lambda its: [i % 7 for i in its]),
                                                    PARAMETERS[-1].name: st.just([])})  # fmt: skip
updates = st.lists(contributions, min_size=1, max_size=3) | st.sampled_from(["load", "restart"])


@settings(max_examples=examples(50), deadline=None)
@given(
    case=st.sampled_from(list(CASES)),
    num_pservers=st.integers(1, 3),
    min_block_size=st.sampled_from([1, 8, 8192]),
    wire=st.sampled_from([WireTypes(), WireTypes("bfloat16", "bfloat16")]),
    max_updates=st.sampled_from([1, 2, 1024]),
    steps=st.lists(
        st.tuples(updates, st.sets(st.integers(0, 2)), st.sampled_from([0, 10**12, None])),
        min_size=1, max_size=12,
    ),
)  # fmt: skip
def test_a_reader_has_the_values_of_the_pservers_from_any_base(
    case: str, num_pservers: int, min_block_size: int, wire: WireTypes, max_updates: int, steps: Any
) -> None:
    shards, oracle = start(case, SPECS, num_pservers, min_block_size, wire=wire)
    readers, groups, specs = [Reader(shards.plan) for _ in range(3)], make_case(case)[1], {s.name: s for s in SPECS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_changes, "MAX_UPDATES", max_updates)
        for number, (update, pulling, forgotten) in enumerate(steps):
            generator = torch.Generator().manual_seed(number)
            if update == "load":
                shards.load(float(number), groups)
                for name in ("a", "b"):
                    oracle.parameters[name].data.fill_(number)
            elif update == "restart":
                for shard in shards.shards:
                    shard.load_state(shard.state)
            else:
                gradients = [
                    {name: make_gradient(specs[name], torch.tensor(its, dtype=torch.int64), generator)
                     for name, its in contribution.items()} for contribution in update
                ]  # fmt: skip
                shards.step(gradients, groups)
                oracle.step(average_rows(gradients), groups)
            assert_equal(shards, oracle, f"after step {number}")
            if forgotten != 0:
                readers[0].forget(forgotten)
            for reader in (readers[i] for i in pulling):
                reader.pull(shards)
                for name, value in reader.parameters.items():
                    assert torch.equal(value, shards.values(name).to(value.dtype)), name


def test_a_pull_brings_the_rows_of_the_remembered_updates_unless_the_block_is_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_changes, "MAX_UPDATES", 2)
    shards, _ = start("sgd", [spec := ParameterSpec("w", (100, 4), is_sparse=True)], 1, 8192)
    reader, generator = Reader(shards.plan), torch.Generator()
    found = []
    for updates in ([], [[3, 5]], [], [[3], [5]], [[3], [4], [5]], [range(79)], [range(80)], [range(70), range(70)]):
        for touched in updates:
            shards.step([{"w": make_gradient(spec, torch.tensor(touched), generator)}], make_case("sgd")[1])
        found.append(reader.pull(shards))
        assert torch.equal(reader.parameters["w"], shards.values("w"))
    whole, rows = 1, 2  # tensors
    assert found == [whole, rows, 0, rows, whole, rows, whole, whole]


def test_all_rows_are_copied_once_for_all_trainers_and_again_after_a_step() -> None:
    shards, _ = start("sgd", [spec := ParameterSpec("w", (100, 4), is_sparse=True)], 1, 8192)
    [shard] = shards.shards
    first, again = shard.encode_since(None, {}), shard.encode_since(None, {})
    assert first[-1] is again[-1]
    shards.step([draw_gradients(0, 0, [spec])], make_case("sgd", 0)[1])
    assert shard.encode_since(None, {})[-1] is not first[-1]


# ---------------------------------------------------------------------- refused pushes

W = ParameterSpec("w", (4, 3), is_sparse=True)


def encode_rows(metadata: Mapping[str, str], **tensors: Tensor) -> bytes:
    """Return a push of the block, whose tensors are `rows` and `values`."""
    named = {"w.block0" + (ROWS if key == "rows" else ""): tensor for key, tensor in tensors.items()}
    dtypes = {torch.int32: "I32", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16"}
    header = encode_header([(name, dtypes[t.dtype], tuple(t.shape)) for name, t in named.items()], metadata)
    return header + b"".join(bytes(view_bytes(t.view(-1))) for t in named.values())


def rows_of(*indices: int, **changes: Tensor) -> dict[str, Tensor]:
    return {"rows": torch.tensor(indices, dtype=torch.int32), "values": torch.ones(3 * len(indices)), **changes}


REFUSED = [
    ("malformed_frame", {"values": torch.ones(3)}, r"must also contain 'w\.block0\.rows'"),
    ("malformed_frame", {"rows": rows_of(1)["rows"]}, r"must also contain 'w\.block0'"),
    ("malformed_frame", rows_of(2, 1), "the indices of a block must increase, from 0 to below its size"),
    ("malformed_frame", rows_of(1, 1), "must increase"),
    ("malformed_frame", rows_of(-1, 1), "must increase"),
    ("malformed_frame", rows_of(1, 4), "must increase"),
    ("malformed_frame", rows_of(4), "must increase"),
    ("wrong_shape", rows_of(0, 1, 2, 3, 4), r"expected \[4\]; actual \[5\]"),  # more than the block has
    ("wrong_shape", rows_of(1, 2, values=torch.ones(3)), r"expected \[6\]; actual \[3\]"),
    ("wrong_shape", rows_of(1, values=torch.ones(1, 3)), r"expected \[3\]; actual \[1, 3\]"),
    ("wrong_shape", rows_of(rows=torch.tensor(1, dtype=torch.int32)), r"expected \[4\]; actual \[\]"),
    ("wrong_dtype", rows_of(1, rows=torch.tensor([1])), "expected I32; actual I64"),
    ("wrong_dtype", rows_of(1, values=torch.ones(3).bfloat16()), "expected F32; actual BF16"),
]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_push_of_wrong_rows_is_refused_and_changes_nothing(mode: str) -> None:
    groups = [make_options("SGD")]
    consistency = Consistency(mode=mode)
    async with bench(1, groups=groups, parameters=[W], initial=False, consistency=consistency) as b:
        await b.call("initial", b.fence(0, 0), encode({"w.block0": torch.zeros(12)}))
        await b.get(0, 0)
        numbers = {COMPUTED_ON_KEY: "0"} if mode == "async" else {}
        for code, tensors, said in REFUSED:
            refusal = await unchanged(b, code, b.call("push", b.fence(0, 1), encode_rows({}, **tensors)))
            assert re.search(said, refusal.text)
        for name in ("momentum", "weight_decay"):
            heavy = encode_rows({**b.completion([{**groups[0], name: 0.5}]), **numbers}, **rows_of(1))
            refusal = await unchanged(b, "bad_hyper_parameters", b.call("push", b.fence(0, 1), heavy))
            assert f"SGD with {name} cannot step sparse parameters: it would change rows without" in refusal.text
        await b.call("push", b.fence(0, 1), encode_rows({**b.completion(), **numbers}, **rows_of(0, 3)))
        if mode == "sync":
            await b.barrier(0, 1)
        values = decode(await b.get(0, 1))[0]["w.block0"].view(4, 3)
        assert values[:, 0].tolist() == pytest.approx([-0.1, 0, 0, -0.1])
