"""The beginning of a run: trainers join, get their ranks and declare the model, which is planned. Pure.

A run may accept `num_trainers` to `max_trainers`. As with torchrun's `--nnodes MIN:MAX`, it then waits until no trainer
has joined for a while: the last call. Ranks are assigned at the end of the last call, since trainers learn them with
the world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from ps_protocol.errors import BadInput, Conflict, ModelMismatch, NotReady
from ps_protocol.membership import Membership
from ps_protocol.messages import DeclareModel, JoinTrainer
from ps_protocol.vocabulary import PROTOCOL_VERSION, Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest

from .model import check_same_model, check_same_tensors, plan_model
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
    if run.record.num_trainers is None and request.world_size is not None:
        run = _fix_num_trainers(run, request.world_size)
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
    report = TrainerReport.begin(trainer, run.record.name, now, round_, has_chosen=request.rank is not None)
    joined = replace(
        run.with_change(trainers={**run.record.trainers, rank: trainer}),
        incarnations={**run.incarnations, rank: trainer.incarnation},
        reports={**run.reports, rank: report},
    )
    return end_last_call(joined, now)


def end_last_call(run: Run, now: float) -> Run:
    """Fix the number of trainers once enough are present and the last call is over, or no further trainer may join."""
    if run.record.num_trainers is not None:
        return run
    fewest, most = run.sizes
    present = [run.reports[rank] for rank in run.record.members]
    needed = max([fewest, *(rank + 1 for rank in run.record.members if run.reports[rank].has_chosen)])
    is_over = all(now - report.joined_at >= run.settings.last_call_seconds for report in present)
    return _fix_num_trainers(run, len(present)) if len(present) == most or (len(present) >= needed and is_over) else run


def _fix_num_trainers(run: Run, num_trainers: int) -> Run:
    """Fix the number of trainers. Trainers without a rank are refused when they ask again."""
    present = [trainer for trainer in run.record.trainers.values() if trainer.is_present]
    choosing = [trainer for trainer in present if run.reports[trainer.rank].has_chosen]
    before = {trainer.rank: trainer for trainer in choosing if trainer.rank < num_trainers}  # by their new ranks
    free = [rank for rank in range(num_trainers) if rank not in before]
    before |= zip(free, (trainer for trainer in present if trainer not in choosing), strict=False)
    moved = {rank: run.incarnations.get(rank, 0) + 1 for rank, trainer in before.items() if trainer.rank != rank}
    trainers = {
        rank: trainer.model_copy(update={"rank": rank, "incarnation": moved.get(rank, trainer.incarnation)})
        for rank, trainer in before.items()
    }
    return replace(
        run.with_change(num_trainers=num_trainers, trainers=trainers),
        incarnations={**run.incarnations, **moved},
        reports={rank: run.reports[trainer.rank] for rank, trainer in before.items()},
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
    fewest, most = run.sizes
    if request.world_size is not None and not fewest <= request.world_size <= most:
        raise Conflict(
            "the WORLD_SIZE of the trainer does not match num_trainers and max_trainers of the coordinator; under "
            "torchrun a host is one trainer, so start with: gradpost up --trainers 1 -- torchrun --standalone …",
            code="world_mismatch",
            expected=f"WORLD_SIZE {fewest}" if fewest == most else f"WORLD_SIZE {fewest} to {most}",
            actual=f"WORLD_SIZE {request.world_size}",
        )
    most = request.world_size or most
    if request.rank is not None and request.rank >= most:
        raise Conflict(
            f"rank {request.rank} must be less than the number of trainers, {most}",
            code="world_mismatch", expected=f"0 to {most - 1}", actual=f"rank {request.rank}",
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
    free = [rank for rank in range(run.sizes[1]) if rank not in taken]
    if run.record.plan is not None and (not free or (wanted in taken and not run.record.trainers[wanted].is_present)):
        others = name_ranks(range(run.sizes[1])) if run.sizes[1] < 3 else f"{run.sizes[1]} trainers"
        text = f"run {run.record.name} is under way with {others}, and this script would train another run after it"
        raise NotReady(text, waiting_for=f"run {run.record.name} to end")
    if wanted is None:
        if not free:
            raise Conflict(
                f"all {run.sizes[1]} ranks are taken. Stop a trainer, or start the run with a larger num_trainers or "
                "max_trainers",
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
    declaration = agree_on_model(run, rank, message)
    is_other = declaration is not message and message.rendezvous != declaration.rendezvous
    if rank == 0 and trainer.has_declared and is_other:
        raise ModelMismatch(f"trainer {rank} must declare the rendezvous that run {record.name} was planned for")
    record = record.with_fields(declaration=declaration).with_trainers([rank], has_declared=True, declaration=None)
    run = replace(run, record=record).with_report(rank, declaration=declaration)
    if trainer.state not in ("joined", "lost"):  # a lost trainer is awaited, and declares late
        return run
    run = replace(run, record=record.with_trainers([rank], state="declared").with_change())
    return run.with_report(rank, is_stuck=False).continue_without_lost()


def agree_on_model(run: Run, rank: Rank, mine: DeclareModel) -> DeclareModel:
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
        f"{mismatch.detail}. All trainers of run {record.name} are gone, so that it has ended; start the script again"
    )
    return run.fail(_name_resumption(run, mismatch) or ModelMismatch(text, **mismatch.facts), now)


def _name_resumption(run: Run, mismatch: ModelMismatch) -> ModelMismatch | None:
    """Return the error of trainers that declare another model than the run that was resumed; None for a new run."""
    if not run.settings.resume:
        return None
    text = f"the resumed run has another model: {mismatch.detail}. Omit --resume to begin a new run"
    return ModelMismatch(text, **mismatch.facts)


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
        return run.fail(_name_resumption(run, error) or error, now)
    starts: dict[Rank, Round] = {}
    if run.settings.consistency.is_async:
        steps = beginning.newest_steps
        others = min(steps.values(), default=beginning.round)
        starts = {rank: steps.get(rank, others) + 1 for rank in members}
    membership = Membership(members, starts, controls=(beginning.controls.model_copy(update={"since": 0}),))
    return replace(
        run, record=record.with_fields(base_round=beginning.round, source=beginning.run, membership=membership)
    )
