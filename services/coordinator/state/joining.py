"""The beginning of a run: trainers join, get their ranks and declare the model, which is planned. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from ps_protocol.errors import BadInput, BadModel, Conflict, ModelMismatch, NotFound, NotReady
from ps_protocol.membership import Membership
from ps_protocol.messages import DeclareModel, JoinTrainer
from ps_protocol.optimizers import check_optimizer
from ps_protocol.plan import SlicePlan, make_plan, make_ring_plan
from ps_protocol.vocabulary import PROTOCOL_VERSION, Incarnation, ParameterSpec, PserverIndex, Rank, Round
from ps_protocol.wire_types import WireTypes
from services.runtime.checkpoints import Manifest

from ..settings import CoordinatorSettings
from .record import TrainerRecord
from .run import Run, TrainerReport, name_ranks


def join_run(run: Run, request: JoinTrainer, now: float) -> Run:
    """Add the trainer of a process, or renew its lease if its request is repeated.

    Once the run has begun, only ranks of lost trainers are free. Raises Conflict, NotReady without a free rank, and the
    errors of `check_expectations`.
    """
    check_expectations(run, request)
    if (known := run.record.find_process(request.instance)) is not None:
        return run.with_report(known.rank, seen_at=now)
    rank = _choose_rank(run, request.rank)
    before = run.record.trainers.get(rank)
    trainer = TrainerRecord(
        rank=rank,
        incarnation=run.incarnations.get(rank, 0) + 1,
        instance=request.instance,
        metrics_address=request.metrics_address,
        is_awaited=before is not None and before.is_awaited,
    )
    round_ = 0 if before is None else run.reports[rank].round
    report = TrainerReport.begin(trainer, run.record.name, now, round_)
    return replace(
        run.with_change(trainers={**run.record.trainers, rank: trainer}),
        incarnations={**run.incarnations, rank: trainer.incarnation},
        reports={**run.reports, rank: report},
    )


def check_protocol(version: int) -> None:
    """Raise BadInput (`unsupported_protocol`) for a process with another version of the protocol."""
    if version != PROTOCOL_VERSION:
        raise BadInput(
            "the sender uses another protocol version; install the same version of Gradpost on all machines",
            code="unsupported_protocol", expected=PROTOCOL_VERSION, actual=version,
        )  # fmt: skip


def check_expectations(run: Run, request: JoinTrainer) -> None:
    """Raise Conflict if no run of this cluster can have such a trainer."""
    size = run.settings.num_trainers
    if request.world_size not in (None, size):
        raise Conflict(
            "the WORLD_SIZE of the trainer does not match num_trainers of the coordinator; under torchrun a host is "
            "one trainer, so start with: gradpost up --trainers 1 -- torchrun --standalone …",
            code="world_mismatch", expected=f"WORLD_SIZE {size}", actual=f"WORLD_SIZE {request.world_size}",
        )  # fmt: skip
    if request.rank is not None and request.rank >= size:
        raise Conflict(
            f"rank {request.rank} must be less than the number of trainers, {size}",
            code="world_mismatch", expected=f"0 to {size - 1}", actual=f"rank {request.rank}",
        )  # fmt: skip
    if actual := run.settings.consistency.unmet(request.expects):
        served = asdict(run.settings.consistency)
        raise Conflict(
            "the trainer expects other settings than the coordinator has; start both with the same settings",
            code="mode_mismatch",
            expected={name: served.get(name, "no such setting") for name in actual},
            actual=actual,
        )


def _choose_rank(run: Run, wanted: Rank | None) -> Rank:
    """Return the rank of a new trainer. Raises Conflict or NotReady without a free one."""
    taken = {rank for rank, t in run.record.trainers.items() if t.is_present or t.state == "done"}
    size = run.settings.num_trainers
    free = [rank for rank in range(size) if rank not in taken]
    if run.record.plan is not None and (not free or (wanted in taken and not run.record.trainers[wanted].is_present)):
        others = name_ranks(range(size)) if size < 3 else f"{size} trainers"
        text = f"run {run.record.name} is under way with {others}, and this script would train another run after it"
        raise NotReady(text, waiting_for=f"run {run.record.name} to end")
    if wanted is None:
        if not free:
            raise Conflict(
                f"all {size} ranks are taken. Stop a trainer, or start the cluster with a larger num_trainers",
                code="rank_taken",
            )
        return free[0]
    if wanted not in free:
        text = f"a living trainer has rank {wanted}; stop that trainer, or start this one with another RANK"
        raise Conflict(text, code="rank_taken", current=run.record.trainers[wanted].incarnation)
    return wanted


def declare_model(run: Run, rank: Rank, message: DeclareModel) -> Run:
    """Store a trainer's declaration. Raises BadInput, or ModelMismatch with the first difference."""
    trainer, record = run.member(rank, message.run, message.incarnation), run.record
    plan_model(message, run.settings, num_pservers=1)  # raises if the model cannot be planned
    declaration = _agree_on_model(run, rank, message)
    is_other = declaration is not message and message.rendezvous != declaration.rendezvous
    if rank == 0 and trainer.has_declared and is_other:
        raise ModelMismatch(f"trainer {rank} must declare the rendezvous that run {record.name} was planned for")
    record = record.with_fields(declaration=declaration).with_trainers([rank], has_declared=True)
    run = replace(run, record=record)
    if trainer.state not in ("joined", "lost"):  # a lost trainer is awaited, and declares late
        return run
    run = replace(run, record=record.with_trainers([rank], state="declared").with_change())
    return run.with_report(rank, is_stuck=False).continue_without_lost()


def _agree_on_model(run: Run, rank: Rank, mine: DeclareModel) -> DeclareModel:
    """Return the declaration of the run, given that of a trainer. Raises ModelMismatch if they differ."""
    record, known = run.record, run.record.declaration
    others = [t.rank for t in record.trainers.values() if t.has_declared and t.is_present and t.rank != rank]
    if known is not None and (record.plan is not None or others):
        check_same_model(rank, mine, f"trainer {others[0]}" if record.plan is None else f"run {record.name}", known)
    is_first = record.plan is None and rank <= min(others, default=rank)
    return mine if known is None or is_first else known


def fail_deserted_run(run: Run, mismatch: ModelMismatch, now: float) -> Run:
    """Fail a run whose trainers are all gone, because a process declares another model. The next run may have it."""
    record = run.record
    if record.plan is None or record.num_declared or not any(t.is_awaited for t in record.trainers.values()):
        return run
    text = (
        f"{mismatch.detail}. All trainers of run {record.name} are gone, so that it has ended: to train another model, "
        "start again without --resume"
    )
    return run.fail(ModelMismatch(text, **mismatch.facts), now)


def start_run(run: Run, pservers: Mapping[PserverIndex, Incarnation], beginning: Manifest | None, now: float) -> Run:
    """Make the plan of a complete run. Training begins once every pserver has installed it.

    The run begins with the checkpoint `beginning`, and fails if that is of another model; None: initial values.
    """
    members, declaration = run.record.members, run.record.declaration
    assert declaration is not None
    plan = plan_model(declaration, run.settings, len(pservers))
    record = run.record.with_fields(plan=plan, uploader=min(members), membership=Membership(members))
    run = replace(run, record=record, holders=pservers, reason="all members are present")
    if beginning is None:
        return run
    try:
        check_same_tensors(plan, beginning.plan, f"the checkpoint of run {beginning.run}")
    except ModelMismatch as error:
        return run.fail(error, now)
    starts: dict[Rank, Round] = {}
    if run.settings.consistency.is_async:
        steps = beginning.newest_steps
        others = min(steps.values(), default=beginning.round)
        starts = {rank: steps.get(rank, others) + 1 for rank in members}
    membership = Membership(members, starts, controls=(beginning.controls.model_copy(update={"since": 0}),))
    return replace(
        run, record=record.with_fields(base_round=beginning.round, source=beginning.run, membership=membership)
    )


# ---------------------------------------------------------------- the declared model

# Settings that need pservers, and the value that has no effect without them.
_OF_PSERVERS = {"push_type": "float32", "pull_type": "float32", "local_steps": 0}
_SAME = "all trainers must build the same model"


def plan_model(model: DeclareModel, settings: CoordinatorSettings, num_pservers: int) -> SlicePlan:
    """Return the slice plan of a declared model. Raises BadModel or BadInput (`unsupported_optimizer`)."""
    sparse = frozenset(model.sparse)
    parameters = [ParameterSpec(*fields, is_sparse=fields[0] in sparse) for fields in model.parameters]
    if unknown := sparse - {spec.name for spec in parameters}:
        raise BadModel(f"there is no parameter {min(unknown)!r:.200}, which is declared as sparse")
    if sparse and (settings.consistency.is_ring or model.local_steps or settings.consistency.compensation == "dc"):
        raise BadModel(
            "strategy ring, local_steps and compensation dc do not support sparse gradients, such as that of "
            f"{model.sparse[0]!r:.200}. Train without them, or create the Embedding with sparse=False"
        )
    if settings.consistency.is_ring:
        if useless := [name for name, same in _OF_PSERVERS.items() if getattr(model, name) not in (None, same)]:
            raise BadModel(f"{', '.join(useless)} would have no effect with strategy ring, which has no pservers")
        return make_ring_plan(parameters, model.buffers)
    if settings.consistency.is_async and model.nonfinite == "skip_round":
        raise BadModel("nonfinite skip_round needs the synchronous mode: the other modes have no rounds")
    if model.max_grad_norm is not None and model.local_steps:
        raise BadModel("max_grad_norm has no effect with local_steps: call clip_grad_norm_ before each local step")
    push, pull = model.push_type or settings.push_type, model.pull_type or settings.pull_type
    wire = WireTypes(push, pull, settings.topk)
    wire.check_mode(settings.consistency)
    if wire.pulls_deltas and model.local_steps:
        raise BadModel("pull_type int8 must not be set with local_steps: trainers change the deltas' base version")
    return make_plan(
        parameters,
        num_pservers,
        min_block_size=settings.min_block_size,
        placement=settings.placement,
        slice_parameters=settings.slice_parameters,
        buffers=model.buffers,
        optimizer=check_optimizer(model.optimizer, model.group_flags, model.members),
        wire=wire,
    )


def find_parameter(plan: SlicePlan, name: str) -> ParameterSpec:
    """Return a parameter. Raises NotFound."""
    if name not in plan.parameter:
        raise NotFound(f"there is no parameter {name!r} in this run")
    return plan.parameter[name]


def check_same_model(rank: Rank, mine: DeclareModel, whose: str, theirs: DeclareModel) -> None:
    """Raise ModelMismatch with the first difference between the declarations of trainer `rank` and of `whose`."""
    for name in DeclareModel.model_fields:
        if name in ("run", "incarnation", "rendezvous", "parameters", "buffers"):
            continue
        if getattr(mine, name) != getattr(theirs, name):
            raise ModelMismatch(
                f"trainer {rank} and {whose} disagree on {name}",
                expected=getattr(theirs, name),
                actual=getattr(mine, name),
            )
    for name, a, b in (("parameters", mine.parameters, theirs.parameters), ("buffers", mine.buffers, theirs.buffers)):
        if len(a) != len(b):
            raise ModelMismatch(
                f"trainer {rank} and {whose} have different numbers of {name}; {_SAME}", expected=len(b), actual=len(a)
            )
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                raise ModelMismatch(
                    f"trainer {rank} and {whose} differ in {name[:-1]} {i}; {_SAME}",
                    expected=_describe(y),
                    actual=_describe(x),
                )


def _describe(tensor: Sequence[Any]) -> str:
    """Return a declared parameter or buffer in words.

    >>> _describe(("0.weight", (33, 16), "F32", 0))
    "'0.weight' of shape [33, 16] and dtype F32 in parameter group 0"
    """
    name, shape, dtype, *groups = tensor
    return f"{name!r} of shape {list(shape)} and dtype {dtype}" + "".join(f" in parameter group {g}" for g in groups)


def check_same_tensors(plan: SlicePlan, other: SlicePlan, whose: str) -> None:
    """Raise ModelMismatch with the first difference between two plans' tensors and optimizers; cuts may differ."""
    for what, mine, theirs in (
        ("parameters", plan.parameters, other.parameters),
        ("buffers", _shapes(plan), _shapes(other)),
        ("optimizer", (plan.optimizer,), (other.optimizer,)),
    ):
        if mine != theirs:
            pairs = [(a, b) for a, b in zip_longest(mine, theirs) if a != b]
            raise ModelMismatch(
                f"the trainers and {whose} declare different {what}", expected=str(pairs[0][1]), actual=str(pairs[0][0])
            )


def _shapes(plan: SlicePlan) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((spec.name, spec.shape, spec.dtype) for spec in plan.buffers)
