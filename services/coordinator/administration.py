"""Changes of a run by an administrator, and their routes, which need the scope `admin`.

A change uses the mechanism of a change of members: it is persisted before a pserver receives it, and applies from the
same round on all pservers. One change and one checkpoint may be under way; the audit log has each before it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, FastAPI, Query, Request
from pydantic import Field

from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, GradpostError, NotFound, NotReady, StorageFailed, TryAgain
from ps_protocol.fields import Count, Flag, Label, Message, Name, OrdinalText, Real, Round
from ps_protocol.membership import Controls
from ps_protocol.messages import CheckpointCreated
from services.runtime.security import name_token

from .audit import MAX_LISTED, AuditEntry
from .coordinator import Coordinator
from .state.losses import evict_trainer
from .state.run import Run

WAIT_SECONDS = 30.0  # for all pservers to install a change
CHECKPOINT_SECONDS = 240.0  # for a checkpoint, and the one before it, which may be under way
MAX_FAILURES = 12  # attempts


Change: TypeAlias = Callable[[Run], Run]  # may raise GradpostError


class ChangeDone(Message):
    """The round from which a change applies; in asynchronous modes, the number of contributions."""

    run: str
    attempt: int
    round: Round
    controls: Controls


class SetRate(Message):
    """A learning rate for one parameter group or all of them; null restores the pushed rate.

    With `optimizer`, the name of one of several optimizers, the groups are those of this optimizer.
    """

    rate: Real | None = Field(ge=0)
    group: Count | None = None
    optimizer: Label | None = None


class StopRun(Message):
    """The end of a run: with a checkpoint, or immediately and as a failure."""

    fail: Flag = False


class RollBack(Message):
    """The round of a complete checkpoint."""

    round: Round


async def _name_requester(request: Request) -> str:
    return name_token(request.scope)


Requester: TypeAlias = Annotated[str, Depends(_name_requester)]


class Administration:
    """The changes, each the endpoint of a route. They raise NotReady unless a run trains.

    A change also raises Conflict, and TryAgain if it takes long. `by` names the token of the request.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._lock = asyncio.Lock()
        self._checkpoint_lock = asyncio.Lock()  # takes minutes, and must not delay a change
        self._audit_lock = asyncio.Lock()
        self._ending: set[asyncio.Task[ChangeDone]] = set()  # running changes

    # ------------------------------------------------------------------ endpoints

    async def controls(self) -> Controls:
        """Return the controls that override what trainers push."""
        return self._coordinator.cluster.run.newest_controls

    async def audit(self, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100) -> list[AuditEntry]:
        """Return the newest requests of administrators and their outcomes, oldest first."""
        return self._coordinator.audit.entries()[-limit:]

    async def pause(self, by: Requester) -> ChangeDone:
        """Pause the run; trainers wait."""
        return await self._control(by, "pause", lambda controls: controls.model_copy(update={"is_paused": True}))

    async def resume(self, by: Requester) -> ChangeDone:
        """Resume a paused run."""
        return await self._control(by, "resume", lambda controls: controls.model_copy(update={"is_paused": False}))

    async def set_rate(self, by: Requester, message: SetRate) -> ChangeDone:
        """Set a learning rate, which overrides the trainers'."""
        rate, group, run = message.rate, message.group, self._training()
        assert run.record.plan is not None
        assert run.record.plan.optimizer is not None
        spec = run.record.plan.optimizer
        groups = range(spec.num_stepped) if message.optimizer is None else spec.groups_of(message.optimizer)
        if group is not None and group >= len(groups):
            raise BadInput(
                f"there is no parameter group {group} in this run",
                code="invalid_message", expected=f"0 to {len(groups) - 1}", actual=group,
            )  # fmt: skip
        if group is not None:
            groups = groups[group : group + 1]

        def edit(controls: Controls) -> Controls:
            others = {index: known for index, known in controls.rates.items() if index not in groups}
            mine = {} if rate is None else dict.fromkeys(groups, rate)
            return controls.model_copy(update={"rates": dict(sorted((others | mine).items()))})

        return await self._control(by, "set rate", edit, rate=rate, group=group, optimizer=message.optimizer)

    async def freeze(self, by: Requester, name: Name) -> ChangeDone:
        """Freeze a parameter, as if it had no gradient."""
        return await self._set_frozen(by, name, is_frozen=True)

    async def unfreeze(self, by: Requester, name: Name) -> ChangeDone:
        """Unfreeze a parameter."""
        return await self._set_frozen(by, name, is_frozen=False)

    async def _set_frozen(self, by: str, name: str, *, is_frozen: bool) -> ChangeDone:
        plan = self._training().record.plan
        assert plan is not None
        if name not in plan.parameter:
            raise NotFound(f"there is no parameter {name!r} in this run")

        def edit(controls: Controls) -> Controls:
            others = {frozen for frozen in controls.frozen if frozen != name}
            return controls.model_copy(update={"frozen": tuple(sorted(others | ({name} if is_frozen else set())))})

        return await self._control(by, "freeze" if is_frozen else "unfreeze", edit, parameter=name)

    async def evict(self, by: Requester, rank: OrdinalText) -> ChangeDone:
        """Continue without a trainer. Another incarnation may join."""

        def leave(run: Run) -> Run:
            return evict_trainer(run, rank, self._coordinator.now())

        return await self._do(leave, by=by, action="evict", arguments={"trainer": rank})

    async def stop(self, by: Requester, message: StopRun) -> ChangeDone:
        """End the run: the trainers' scripts get the error `run_stopped`. Without `fail` a checkpoint is made first."""
        coordinator, cluster = self._coordinator, self._coordinator.cluster
        run = cluster.run
        if run.record.is_over or not run.record.trainers:
            raise NotReady(
                "no run is under way, so that none can be stopped. To see the last one: gradpost status",
                waiting_for="a run",
            )
        is_saved = not message.fail and run.record.state == "training" and not run.settings.consistency.is_ring
        async with self._audited(run, by=by, action="stop", arguments=message.model_dump()) as outcome:
            if is_saved:
                async with self._checkpoint_lock:
                    await self._save_before_stop(run)
            self._check_current(run)
            cluster.run = cluster.run.stop(coordinator.now(), is_failure=message.fail)
            coordinator.changed()
            outcome["round"] = min(cluster.rounds, default=cluster.run.highest_round)
        coordinator.events.add(cluster, "change", f"stop: after round {outcome['round']}", **message.model_dump())
        run = cluster.refresh(run)
        return ChangeDone(
            run=run.record.name, attempt=run.record.attempt, round=outcome["round"], controls=run.newest_controls
        )

    async def _save_before_stop(self, run: Run) -> None:
        try:
            await self._await_checkpoint(run)
        except TryAgain as error:  # or NotReady, which is one
            text = f"{error.detail}. To stop without a checkpoint: gradpost stop --fail"
            raise type(error)(text, code=error.code, **error.facts) from None

    async def roll_back(self, by: Requester, message: RollBack) -> ChangeDone:
        """Roll back to a checkpoint."""
        round_ = message.round
        if self._training().settings.consistency.is_async:
            raise Conflict(
                "an asynchronous run cannot be rolled back; resume it from a checkpoint instead",
                code="mode_mismatch", expected="sync",
            )  # fmt: skip
        self._find_checkpoint(round_)

        def go_back(run: Run) -> Run:
            self._find_checkpoint(round_)  # it may have been deleted since; from now on it is not
            if obstacle := run.find_rollback_obstacle(round_):
                raise Conflict(f"{obstacle}; a rollback would fail the run")
            return run.request_rollback(round_)

        def check(run: Run) -> None:
            if run.requests.refusal:
                raise Conflict(f"{run.requests.refusal}; the run continues without a rollback")
            if (run.record.base_round or 0) != round_:
                text = f"the run was rolled back to round {run.record.base_round or 0}, not to round {round_}"
                raise Conflict(text, current=run.record.base_round)

        return await self._do(go_back, check, by=by, action="roll back", arguments={"round": round_})

    async def make_checkpoint(self, by: Requester) -> CheckpointCreated:
        """Make a checkpoint of the whole model, and wait until it is complete."""
        self._coordinator.cluster.require_pservers()
        run = self._coordinator.cluster.run
        async with self._checkpoint_lock, self._audited(run, by=by, action="checkpoint") as outcome:
            done = await self._await_checkpoint(run)
            outcome["round"] = done.round
            return done

    async def _await_checkpoint(self, run: Run) -> CheckpointCreated:
        coordinator, cluster, schedule = self._coordinator, self._coordinator.cluster, self._coordinator.schedule
        cluster.require_training()
        self._check_current(run)
        run = cluster.run
        if not cluster.registry.is_complete:
            raise NotReady("a checkpoint requires every pserver to be registered", waiting_for=cluster.waiting_for)
        await schedule.refresh_rounds()
        is_paused = cluster.run.newest_controls.is_paused
        if is_paused and run.settings.consistency.is_async and len(set(cluster.rounds)) > 1:
            text = f"the run is paused while its pservers have applied {sorted(cluster.rounds)} contributions"
            raise TryAgain(f"{text}; a checkpoint requires equal numbers, so resume the run first")
        round_ = schedule.request()

        def has_ended() -> bool:
            is_gone = cluster.run.record.attempt_id != run.record.attempt_id or cluster.run.record.state != "training"
            return is_gone or round_ <= newest() or schedule.num_failures >= MAX_FAILURES

        def newest() -> Round:
            return max(cluster.run.complete_checkpoints, default=-1)

        coordinator.changed()
        try:
            await coordinator.wait_until(has_ended, CHECKPOINT_SECONDS)
        finally:
            schedule.withdraw_request()
        self._check_current(run)
        cluster.require_training()
        if cluster.run.record.attempt != run.record.attempt:
            text = f"the run was rolled back to round {cluster.run.record.base_round or 0}"
            raise TryAgain(f"{text} before the checkpoint was complete")
        if newest() < round_:
            text = f"no checkpoint of round {round_} or later is complete; see the pservers' logs"
            raise TryAgain(text, complete=list(cluster.run.complete_checkpoints))
        return CheckpointCreated(run=run.record.name, round=newest(), place=coordinator.place.url)

    # ------------------------------------------------------------------ execution

    async def _control(
        self, by: str, action: str, edit: Callable[[Controls], Controls], **arguments: Any
    ) -> ChangeDone:
        def want(run: Run) -> Run:
            return run.request_controls(edit(run.newest_controls))

        return await self._do(want, by=by, action=action, arguments=arguments)

    async def _do(self, change: Change, check: Callable[[Run], None] = lambda _: None, **request: Any) -> ChangeDone:
        """Apply a change. `check` raises if it did not take effect. `request` becomes the entry in the audit log."""
        run = self._training()
        async with self._lock:
            self._training()
            self._check_current(run)
            ending = asyncio.create_task(self._carry_out(run, change, check, request), name=request["action"])
            self._ending.add(ending)  # completes even if its requester leaves
            ending.add_done_callback(self._ended)
            await asyncio.wait({ending}, timeout=WAIT_SECONDS)
            if not ending.done():
                text = f"the change is pending after {WAIT_SECONDS:g} s; it applies once all pservers have installed it"
                raise TryAgain(text, waiting_for=self._coordinator.cluster.waiting_for)
            return ending.result()

    async def _carry_out(
        self, before: Run, change: Change, check: Callable[[Run], None], request: dict[str, Any]
    ) -> ChangeDone:
        """Make a change, and wait until every pserver has installed it or the run is over."""
        coordinator, cluster = self._coordinator, self._coordinator.cluster
        async with self._audited(before, **request) as outcome:
            self._check_current(before)
            cluster.run = change(cluster.run)
            number = cluster.run.record.change_number
            coordinator.changed()

            def has_ended() -> bool:
                run = cluster.run
                return not cluster.is_current(before) or run.record.is_over or run.installed.number >= number

            while not has_ended():
                await coordinator.wait_until(has_ended, WAIT_SECONDS)
            self._check_current(before)
            run = cluster.run
            if run.record.is_over:
                raise NotReady(f"run {run.record.name} is {run.record.state}", waiting_for="a run")
            check(run)
            done = self._describe(run, request["action"])
            outcome["round"] = done.round
        text = f"{_describe_request(request['action'], request['arguments'])}: from round {done.round} on"
        coordinator.events.add(cluster, "change", text, **request["arguments"])
        return done

    def _check_current(self, run: Run) -> None:
        if not self._coordinator.cluster.is_current(run):
            raise NotReady("another run has begun", waiting_for="a new request")

    def _ended(self, ending: asyncio.Task[ChangeDone]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled():
            ending.exception()  # the audit log has it

    def _describe(self, run: Run, action: str) -> ChangeDone:
        rounds = [member.round for member in self._coordinator.cluster.registry.members.values()]
        round_ = max(rounds, default=0) + 1
        if action == "roll back":
            round_ = (run.record.base_round or 0) + 1
        elif action != "evict" and run.record.membership.controls:
            round_ = run.record.membership.newest_controls.since
        return ChangeDone(run=run.record.name, attempt=run.record.attempt, round=round_, controls=run.newest_controls)

    def _training(self) -> Run:
        cluster = self._coordinator.cluster
        cluster.require_training()
        return cluster.run

    def _find_checkpoint(self, round_: Round) -> None:
        complete = self._coordinator.cluster.run.complete_checkpoints
        if round_ not in complete:
            there = ", ".join(map(str, complete)) or "none"
            raise NotFound(f"there is no complete checkpoint of round {round_}; complete rounds: {there}")

    @asynccontextmanager
    async def _audited(self, run: Run, **request: Any) -> AsyncIterator[dict[str, Any]]:
        """Log a request before the block, and its outcome after the block, with the fields that the block adds."""
        number = await self._write(run, outcome="requested", **request)
        outcome: dict[str, Any] = {}
        try:
            yield outcome
        except GradpostError as error:
            await self._write(run, number=number, outcome="failed", detail=str(error), **request)
            raise
        await self._write(run, number=number, outcome="done", **outcome, **request)

    async def _write(self, run: Run, **members: Any) -> int:
        audit, record = self._coordinator.audit, self._coordinator.cluster.refresh(run).record
        try:
            async with self._audit_lock:
                entry = await asyncio.to_thread(audit.add, run=record.name, attempt=record.attempt, **members)
        except OSError as error:
            when = "before the change, which was not made" if members["outcome"] == "requested" else "after the change"
            raise StorageFailed(f"the audit log cannot be written {when}: {error}") from error
        return entry.number


def _describe_request(action: str, arguments: Mapping[str, Any]) -> str:
    """Return a request in words.

    >>> _describe_request("set rate", {"rate": 0.05, "group": 1, "optimizer": None})
    'set rate 0.05, group 1'
    >>> _describe_request("set rate", {"rate": None}), _describe_request("freeze", {"parameter": "fc.bias"})
    ('set rate to that of the script', 'freeze parameter fc.bias')
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    words = ", ".join(f"{value}" if action.endswith(name) else f"{name} {value}" for name, value in given.items())
    if arguments.get("rate", 0) is None:
        words = ", ".join(filter(None, ("to that of the script", words)))
    return f"{action} {words}".rstrip()


def add_administration_routes(app: FastAPI, coordinator: Coordinator) -> None:
    """Add the routes to the application."""
    administration = Administration(coordinator)
    app.get(routes.CONTROLS, tags=["control"])(administration.controls)
    app.post(routes.PAUSE, tags=["control"])(administration.pause)
    app.post(routes.RESUME, tags=["control"])(administration.resume)
    app.put(routes.RATE, tags=["control"])(administration.set_rate)
    app.put(routes.FROZEN, tags=["control"])(administration.freeze)
    app.delete(routes.FROZEN, tags=["control"])(administration.unfreeze)
    app.post(routes.EVICT, tags=["control"])(administration.evict)
    app.post(routes.STOP, tags=["control"])(administration.stop)
    app.post(routes.ROLL_BACK, tags=["control"])(administration.roll_back)
    app.post(routes.CHECKPOINTS, tags=["control"])(administration.make_checkpoint)
    app.get(routes.AUDIT, tags=["inspection"])(administration.audit)
