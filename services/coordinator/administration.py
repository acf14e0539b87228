"""Changes of a run by an administrator, and their routes, which need the scope `admin`.

A change uses the mechanism of a change of members: it is persisted before a pserver receives it, and applies from the
same round on all pservers. One change and one checkpoint may be under way. The log has every request, before it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, FastAPI, Request
from pydantic import Field

from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, GradpostError, NotFound, NotReady, TryAgain
from ps_protocol.fields import Count, Flag, Label, Message, Name, OrdinalText, Real, Round
from ps_protocol.membership import Controls
from ps_protocol.messages import CheckpointCreated
from ps_protocol.optimizers import OptimizerSpec
from ps_protocol.plan import SlicePlan
from services.runtime.logs import get_logger
from services.runtime.security import name_token

from .coordinator import Coordinator
from .state.joining import find_parameter
from .state.losses import evict_trainer
from .state.run import Run

log = get_logger()

WAIT_SECONDS = 30.0  # for all pservers to install a change
END_SECONDS = 3.0  # for all trainers to leave a stopped run, so that its summary is made
CHECKPOINT_SECONDS = 240.0  # for a checkpoint, and the one before it, which may be under way
MAX_FAILURES = 12  # attempts


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

    def select_groups(self, spec: OptimizerSpec) -> Sequence[int]:
        """Return the groups, as indices of the groups of all optimizers. Raises BadInput if there is no such group."""
        groups: Sequence[int] = range(spec.num_stepped) if self.optimizer is None else spec.groups_of(self.optimizer)
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
        self._cluster = coordinator.cluster
        self._lock = asyncio.Lock()
        self._checkpoint_lock = asyncio.Lock()  # takes minutes, and must not delay a change

    # ------------------------------------------------------------------ endpoints

    async def controls(self) -> Controls:
        """Return the controls that override what trainers push."""
        return self._cluster.run.newest_controls

    async def pause(self, by: Requester) -> ChangeDone:
        """Pause the run; trainers wait."""
        return await self._control(by, "pause", lambda _: {"is_paused": True})

    async def resume(self, by: Requester) -> ChangeDone:
        """Resume a paused run."""
        return await self._control(by, "resume", lambda _: {"is_paused": False})

    async def set_rate(self, by: Requester, message: SetRate) -> ChangeDone:
        """Set a learning rate, which overrides the trainers'."""
        optimizer = self._find_plan().optimizer
        assert optimizer is not None
        groups = message.select_groups(optimizer)

        def edit(controls: Controls) -> dict[str, Any]:
            others = {index: known for index, known in controls.rates.items() if index not in groups}
            mine = {} if message.rate is None else dict.fromkeys(groups, message.rate)
            return {"rates": dict(sorted((others | mine).items()))}

        return await self._control(by, "set rate", edit, **message.model_dump())

    async def freeze(self, by: Requester, name: Name) -> ChangeDone:
        """Freeze a parameter, as if it had no gradient."""
        return await self._freeze(by, "freeze", name, lambda frozen: frozen | {name})

    async def unfreeze(self, by: Requester, name: Name) -> ChangeDone:
        """Unfreeze a parameter."""
        return await self._freeze(by, "unfreeze", name, lambda frozen: frozen - {name})

    async def _freeze(self, by: str, action: str, name: str, edit: Callable[[set[str]], set[str]]) -> ChangeDone:
        find_parameter(self._find_plan(), name)
        return await self._control(
            by, action, lambda old: {"frozen": tuple(sorted(edit({*old.frozen})))}, parameter=name
        )

    async def evict(self, by: Requester, rank: OrdinalText) -> ChangeDone:
        """Continue without a trainer. Another incarnation may join."""
        return await self._do(
            by,
            "evict",
            lambda run: evict_trainer(run, rank, self._coordinator.now()),
            lambda _: max(self._cluster.rounds, default=0) + 1,
            {"trainer": rank},
        )

    async def roll_back(self, by: Requester, message: RollBack) -> ChangeDone:
        """Roll back to a checkpoint."""
        round_ = message.round
        self._cluster.require_training()
        if self._cluster.run.settings.consistency.is_async:
            raise Conflict(
                "an asynchronous run cannot be rolled back; resume it from a checkpoint instead",
                code="mode_mismatch", expected="sync",
            )  # fmt: skip
        _check_checkpoint(self._cluster.run, round_)

        def go_back(run: Run) -> Run:
            _check_checkpoint(run, round_)  # it may have been deleted since; from now on it is not
            if obstacle := run.find_rollback_obstacle(round_):
                raise Conflict(f"{obstacle}; a rollback would fail the run")
            return run.request_rollback(round_)

        def find_round(run: Run) -> Round:
            if run.refusal:
                raise Conflict(f"{run.refusal}; the run continues without a rollback")
            base = run.record.base_round or 0
            if base != round_:
                raise Conflict(f"the run was rolled back to round {base}, not to round {round_}", current=base)
            return base + 1

        return await self._do(by, "roll back", go_back, find_round, {"round": round_})

    async def stop(self, by: Requester, message: StopRun) -> ChangeDone:
        """End the run: the trainers' scripts get the error `run_stopped`. Without `fail` a checkpoint is made first."""
        coordinator, cluster, run = self._coordinator, self._cluster, self._cluster.run
        if run.record.is_over or not run.record.trainers:
            raise NotReady(
                "no run is under way, so that none can be stopped. To see the last one: gradpost status",
                waiting_for="a run",
            )
        is_saved = not message.fail and run.record.state == "training" and not run.settings.consistency.is_ring
        async with self._listed(by, "stop", message.model_dump()) as outcome:
            if is_saved:
                try:
                    async with self._checkpoint_lock:
                        await self._await_checkpoint(run)
                except TryAgain as error:  # or NotReady, which is one
                    text = f"{error.detail}. To stop without a checkpoint: gradpost stop --fail"
                    raise type(error)(text, code=error.code, **error.facts) from None
            self._check_current(run)
            cluster.run = cluster.run.stop(coordinator.now(), is_failure=message.fail)
            coordinator.changed()
            await coordinator.persist()  # else a restarted coordinator would continue the run
            # The pservers may apply more rounds until they have the end.
            await coordinator.wait_until(lambda: bool(coordinator.result.find_summary(run.record.name)), END_SECONDS)
            summary = coordinator.result.find_summary(run.record.name)
            outcome["round"] = summary.rounds if summary else min(cluster.rounds, default=cluster.run.highest_round)
        return _describe(cluster.refresh(run), outcome["round"])

    async def make_checkpoint(self, by: Requester) -> CheckpointCreated:
        """Make a checkpoint of the whole model, and wait until it is complete."""
        self._cluster.require_pservers()
        run = self._cluster.run
        async with self._checkpoint_lock, self._listed(by, "checkpoint") as outcome:
            outcome["round"] = await self._await_checkpoint(run)
        place = self._coordinator.checkpoints.place.url
        return CheckpointCreated(run=run.record.name, round=outcome["round"], place=place)

    async def _await_checkpoint(self, run: Run) -> Round:
        coordinator, cluster, attempt = self._coordinator, self._cluster, self._cluster.run.record.attempt
        self._check_training(run)
        if not cluster.registry.is_complete:
            raise NotReady("a checkpoint requires every pserver to be registered", waiting_for=cluster.waiting_for)
        await coordinator.read_states()
        is_paused = cluster.run.newest_controls.is_paused
        if is_paused and run.settings.consistency.is_async and len(set(cluster.rounds)) > 1:
            text = f"the run is paused while its pservers have applied {sorted(cluster.rounds)} contributions"
            raise TryAgain(f"{text}; a checkpoint requires equal numbers, so resume the run first")
        try:
            return await coordinator.checkpoints.make(cluster.refresh(run), CHECKPOINT_SECONDS, MAX_FAILURES)
        except TryAgain:
            self._check_training(run)
            if cluster.run.record.attempt != attempt:
                text = f"the run was rolled back to round {cluster.run.record.base_round or 0}"
                raise TryAgain(f"{text} before the checkpoint was complete") from None
            raise

    # ------------------------------------------------------------------ execution

    async def _control(
        self, by: str, action: str, edit: Callable[[Controls], dict[str, Any]], **arguments: Any
    ) -> ChangeDone:
        def want(run: Run) -> Run:
            old = run.newest_controls
            return run.request_controls(old.model_copy(update=edit(old)))

        def since(run: Run) -> Round:
            return run.record.membership.newest_controls.since

        return await self._do(by, action, want, since, arguments)

    async def _do(
        self,
        by: str,
        action: str,
        change: Callable[[Run], Run],
        find_round: Callable[[Run], Round],
        arguments: Mapping[str, Any],
    ) -> ChangeDone:
        """Make a change, and wait until every pserver has installed it. `find_round` returns its first round.

        Both functions may raise GradpostError: if the change is refused, or did not take effect.
        """
        cluster, before = self._cluster, self._cluster.run
        self._check_training(before)
        async with self._lock, self._listed(by, action, arguments) as outcome:
            self._check_training(before)
            cluster.run = change(cluster.run)
            number = cluster.run.record.change_number
            self._coordinator.changed()

            def has_ended() -> bool:
                run = cluster.run
                return not cluster.is_current(before) or run.record.is_over or run.installed_number >= number

            await self._coordinator.wait_until(has_ended, WAIT_SECONDS)
            self._check_current(before)
            run = cluster.run
            if run.record.is_over:
                raise NotReady(f"run {run.record.name} is {run.record.state}", waiting_for="a run")
            if not has_ended():
                text = f"the change is pending after {WAIT_SECONDS:g} s; it applies once all pservers have installed it"
                raise TryAgain(text, waiting_for=cluster.waiting_for)
            outcome["round"] = find_round(run)
        return _describe(run, outcome["round"])

    def _check_current(self, run: Run) -> None:
        if not self._cluster.is_current(run):
            raise NotReady("another run has begun", waiting_for="a new request")

    def _check_training(self, run: Run) -> None:
        self._cluster.require_training()
        self._check_current(run)

    def _find_plan(self) -> SlicePlan:
        self._cluster.require_training()
        assert self._cluster.run.record.plan is not None
        return self._cluster.run.record.plan

    @asynccontextmanager
    async def _listed(
        self, by: str, action: str, arguments: Mapping[str, Any] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Log a request, and add its outcome to the events after the block, which sets the `round` of its effect."""
        events, cluster, given = (
            self._coordinator.events,
            self._cluster,
            {"action": action, "arguments": arguments or {}},
        )
        what, since = _describe_request(action, arguments or {}), _SINCE.get(action, "from round {} on")
        log.info("an administrator requests a change", by=by, change=what)
        outcome: dict[str, Any] = {}
        try:
            yield outcome
        except GradpostError as error:
            events.add(cluster, "change", f"{what} has failed: {error}", by, outcome="failed", **given)
            raise
        text = f"{what}: {since.format(outcome['round'])}"
        events.add(cluster, "change", text, by, outcome="done", **outcome, **given)


def _check_checkpoint(run: Run, round_: Round) -> None:
    if round_ not in run.record.checkpoints:
        there = ", ".join(map(str, run.record.checkpoints)) or "none"
        raise NotFound(f"there is no complete checkpoint of round {round_}; complete rounds: {there}")


def _describe(run: Run, round_: Round) -> ChangeDone:
    return ChangeDone(run=run.record.name, attempt=run.record.attempt, round=round_, controls=run.newest_controls)


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


def add_administration_routes(app: FastAPI, coordinator: Coordinator) -> None:
    """Add the routes to the application."""
    administration = Administration(coordinator)
    for method, route, endpoint in (
        ("GET", routes.CONTROLS, administration.controls),
        ("POST", routes.PAUSE, administration.pause),
        ("POST", routes.RESUME, administration.resume),
        ("PUT", routes.RATE, administration.set_rate),
        ("PUT", routes.FROZEN, administration.freeze),
        ("DELETE", routes.FROZEN, administration.unfreeze),
        ("POST", routes.EVICT, administration.evict),
        ("POST", routes.STOP, administration.stop),
        ("POST", routes.ROLL_BACK, administration.roll_back),
        ("POST", routes.CHECKPOINTS, administration.make_checkpoint),
    ):
        app.add_api_route(route, endpoint, methods=[method], tags=["control"])
