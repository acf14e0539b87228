"""Changes of a run by an administrator, and their routes, which need the scope `admin`.

A change uses the mechanism of a change of members: it is persisted before a pserver receives it, and applies from the
same round on all pservers. One change and one checkpoint may be under way. The request is written before it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, FastAPI, Request
from pydantic import Field

from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, GradpostError, NotFound, NotReady, StorageFailed, TryAgain
from ps_protocol.fields import Count, Flag, Label, Message, Name, OrdinalText, Real, Round
from ps_protocol.membership import Controls
from ps_protocol.messages import CheckpointCreated, Override
from ps_protocol.optimizers import OptimizerSpec
from services.runtime.security import name_token

from .coordinator import Coordinator
from .events import Event
from .state.losses import evict_trainer
from .state.run import Run

WAIT_SECONDS = 30.0  # for all pservers to install a change
END_SECONDS = 3.0  # for all trainers to leave a stopped run, so that its summary is made
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

    def select_groups(self, spec: OptimizerSpec) -> range:
        """Return the groups, as indices of the groups of all optimizers. Raises BadInput if there is no such group."""
        groups = range(spec.num_stepped) if self.optimizer is None else spec.groups_of(self.optimizer)
        if self.group is None:
            return groups
        if self.group >= len(groups):
            raise BadInput(
                f"there is no parameter group {self.group} in this run",
                code="invalid_message", expected=f"0 to {len(groups) - 1}", actual=self.group,
            )  # fmt: skip
        return groups[self.group : self.group + 1]


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
        self._events_lock = asyncio.Lock()
        self._ending: set[asyncio.Task[ChangeDone]] = set()  # running changes

    # ------------------------------------------------------------------ endpoints

    async def controls(self) -> Controls:
        """Return the controls that override what trainers push."""
        return self._coordinator.cluster.run.newest_controls

    async def pause(self, by: Requester) -> ChangeDone:
        """Pause the run; trainers wait."""
        return await self._control(by, "pause", lambda controls: controls.model_copy(update={"is_paused": True}))

    async def resume(self, by: Requester) -> ChangeDone:
        """Resume a paused run."""
        return await self._control(by, "resume", lambda controls: controls.model_copy(update={"is_paused": False}))

    async def set_rate(self, by: Requester, message: SetRate) -> ChangeDone:
        """Set a learning rate, which overrides the trainers'."""
        rate, run = message.rate, self._training()
        assert run.record.plan is not None
        assert run.record.plan.optimizer is not None
        groups = message.select_groups(run.record.plan.optimizer)

        def edit(controls: Controls) -> Controls:
            others = {index: known for index, known in controls.rates.items() if index not in groups}
            mine = {} if rate is None else dict.fromkeys(groups, rate)
            return controls.model_copy(update={"rates": dict(sorted((others | mine).items()))})

        return await self._control(by, "set rate", edit, **message.model_dump())

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
        async with self._audited(by=by, action="stop", arguments=message.model_dump()) as outcome:
            if is_saved:
                async with self._checkpoint_lock:
                    await self._save_before_stop(run)
            self._check_current(run)
            cluster.run = cluster.run.stop(coordinator.now(), is_failure=message.fail)
            coordinator.changed()
            await coordinator.persist()  # else a restarted coordinator would continue the run

            def find_rounds() -> Round | None:
                summary = coordinator.result.find_summary(run.record.name)
                return None if summary is None else summary.rounds

            # The pservers may apply more rounds until they have the end.
            await coordinator.wait_until(lambda: find_rounds() is not None, END_SECONDS)
            rounds = find_rounds()
            outcome["round"] = min(cluster.rounds, default=cluster.run.highest_round) if rounds is None else rounds
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
        async with self._checkpoint_lock, self._audited(by=by, action="checkpoint") as outcome:
            done = await self._await_checkpoint(run)
            outcome["round"] = done.round
            return done

    async def _await_checkpoint(self, run: Run) -> CheckpointCreated:
        coordinator, cluster = self._coordinator, self._coordinator.cluster
        cluster.require_training()
        self._check_current(run)
        run = cluster.run
        if not cluster.registry.is_complete:
            raise NotReady("a checkpoint requires every pserver to be registered", waiting_for=cluster.waiting_for)
        await coordinator.read_states()
        is_paused = cluster.run.newest_controls.is_paused
        if is_paused and run.settings.consistency.is_async and len(set(cluster.rounds)) > 1:
            text = f"the run is paused while its pservers have applied {sorted(cluster.rounds)} contributions"
            raise TryAgain(f"{text}; a checkpoint requires equal numbers, so resume the run first")
        try:
            round_ = await coordinator.checkpoints.make(run, CHECKPOINT_SECONDS, MAX_FAILURES)
        except TryAgain:
            self._check_current(run)
            cluster.require_training()
            if cluster.run.record.attempt != run.record.attempt:
                text = f"the run was rolled back to round {cluster.run.record.base_round or 0}"
                raise TryAgain(f"{text} before the checkpoint was complete") from None
            raise
        return CheckpointCreated(run=run.record.name, round=round_, place=coordinator.checkpoints.place.url)

    # ------------------------------------------------------------------ execution

    async def _control(
        self, by: str, action: str, edit: Callable[[Controls], Controls], **arguments: Any
    ) -> ChangeDone:
        def want(run: Run) -> Run:
            return run.request_controls(edit(run.newest_controls))

        return await self._do(want, by=by, action=action, arguments=arguments)

    async def _do(self, change: Change, check: Callable[[Run], None] = lambda _: None, **request: Any) -> ChangeDone:
        """Apply a change. `check` raises if it did not take effect. `request` becomes events."""
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
        async with self._audited(**request) as outcome:
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
        return done

    def _check_current(self, run: Run) -> None:
        if not self._coordinator.cluster.is_current(run):
            raise NotReady("another run has begun", waiting_for="a new request")

    def _ended(self, ending: asyncio.Task[ChangeDone]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled():
            ending.exception()  # the events have it

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
    async def _audited(
        self, by: str, action: str, arguments: Mapping[str, Any] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Write a request before the block, and its outcome after the block, which sets the `round` of its effect."""
        given: dict[str, Any] = {"action": action, "arguments": arguments or {}}
        what, since = _describe_request(**given), _SINCE.get(action, "from round {} on")
        request = await self._write(f"{what} is requested", by, outcome="requested", **given)
        outcome: dict[str, Any] = {}
        try:
            yield outcome
        except GradpostError as error:
            await self._write(f"{what} has failed: {error}", by, outcome="failed", request=request.id, **given)
            raise
        text = f"{what}: {since.format(outcome['round'])}"
        await self._write(text, by, outcome="done", request=request.id, **outcome, **given)

    async def _write(self, text: str, by: str, **facts: Any) -> Event:
        events = self._coordinator.events
        event = events.add(self._coordinator.cluster, "change", text, by, **facts)
        try:
            async with self._events_lock:
                await asyncio.to_thread(events.write, event)
        except OSError as error:
            is_request = facts["outcome"] == "requested"
            when = "before the change, which was not made" if is_request else "after the change"
            problem = f"the audit log cannot be written {when}: {error}"
            events.add(self._coordinator.cluster, "change", problem)
            raise StorageFailed(problem) from error
        return event


_SINCE = {"stop": "after round {}", "checkpoint": "of round {}"}


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


def describe_overrides(run: Run, events: Iterable[Event]) -> tuple[Override, ...]:
    """Return the learning rates and frozen parameters that override the script's, each with its newest request."""
    controls, plan, newest = run.newest_controls, run.record.plan, dict[int | str, Event]()
    for event in events:
        if event.run != run.record.name or event.facts.get("outcome") != "done":
            continue
        action, arguments = event.facts["action"], event.facts["arguments"]
        if action == "freeze":
            newest[arguments["parameter"]] = event
        elif action == "set rate" and plan is not None and plan.optimizer is not None:
            message = SetRate(**arguments)
            same = (
                group for group in message.select_groups(plan.optimizer) if controls.rates.get(group) == message.rate
            )
            newest |= dict.fromkeys(same, event)
    texts: dict[int | str, str] = {
        g: f"learning rate {rate:g} for parameter group {g}" for g, rate in controls.rates.items()
    }
    texts |= {name: f"parameter {name} is frozen" for name in controls.frozen}
    return tuple(
        Override(text=text, round=newest[key].facts["round"], by=newest[key].by, at=newest[key].at)
        if key in newest
        else Override(text=text)
        for key, text in texts.items()
    )


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
