"""Reading from several pservers what belongs to one version.

Rounds go on while pservers answer. So they are asked for what they have; if that is not of one round, a later one is
named, which is not over anywhere, and each answers right after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from ps_protocol.errors import NotReady, StaleRound, TryAgain
from ps_protocol.messages import PserverState
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import STATE
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.errors import raise_for_problem

from ..coordinator import Coordinator
from ..pservers import PserverMember

TRIES = 6
WAIT_SECONDS = 10.0  # for a named round
READ_SECONDS = 30.0  # for the answer itself


class Answer:
    """What a pserver has answered; its metadata says what it belongs to."""

    metadata: dict[str, str]

    @property
    def run(self) -> str:
        """Its name."""
        return self.metadata["run"]

    @property
    def attempt(self) -> int:
        """Of the run."""
        return int(self.metadata["attempt"])

    @property
    def version(self) -> Round:
        """The round, in asynchronous modes contributions."""
        return int(self.metadata["round"])


A = TypeVar("A", bound=Answer)


def current_plan(coordinator: Coordinator) -> SlicePlan:
    """The plan of the run, for those who ask pservers. Raises NotReady before there is one, `no_pservers`."""
    coordinator.cluster.need_pservers()
    plan = coordinator.cluster.run.plan
    if plan is None:
        raise NotReady("no run has begun, so there are no parameters yet", waiting_for=coordinator.cluster.waiting_for)
    return plan


def find_member(coordinator: Coordinator, index: PserverIndex) -> PserverMember:
    """A living pserver. Raises NotReady if it is not here."""
    member = coordinator.cluster.registry.members.get(index)
    if member is None:
        raise NotReady(f"pserver {index} is not here", waiting_for=f"pserver {index}")
    return member


def round_everywhere(coordinator: Coordinator) -> Round:
    """The newest that every pserver has said to have."""
    return min((member.round for member in coordinator.cluster.registry.members.values()), default=0)


async def read_alike(
    coordinator: Coordinator,
    pservers: Sequence[PserverIndex],
    ask: Callable[[PserverMember, Round | None], Awaitable[A]],
) -> list[A]:
    """What these pservers answer, all of one version, in their order; asynchronous modes have none in common.

    `ask` gets a named round, or None for what there is. Raises TryAgain if no round could be agreed on, and what `ask`
    does.
    """
    named: Round | None = None
    ahead = 1
    for _ in range(TRIES):
        members = [find_member(coordinator, index) for index in pservers]
        answers = await asyncio.gather(*(ask(member, named) for member in members), return_exceptions=True)
        late = [error for error in answers if isinstance(error, StaleRound)]
        for error in answers:
            if isinstance(error, BaseException) and not isinstance(error, StaleRound):
                raise error
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        versions = {(answer.run, answer.attempt, answer.version) for answer in found}
        if not late and (len(versions) <= 1 or not coordinator.cluster.run.defaults.consistency.has_common_versions):
            return found
        rounds = [version for _, _, version in versions]
        newest = max([*rounds, *(int(error.facts.get("current") or 0) for error in late)])
        named, ahead = newest + ahead, 2 * ahead
    raise TryAgain(f"the pservers moved on {TRIES} times while they were being read")


async def get_from(coordinator: Coordinator, member: PserverMember, route: str, parameters: dict[str, Any]) -> bytes:
    """The body that a pserver answers. Raises what its problem stands for, TryAgain if it does not answer."""
    try:
        response = await coordinator.http.get(
            member.info.address + route, params=parameters, timeout=READ_SECONDS + WAIT_SECONDS
        )
        raise_for_problem(response)
    except httpx.HTTPError as error:
        raise TryAgain(f"pserver {member.info.index} did not answer: {error!r}") from error
    return response.content


async def read_versions(coordinator: Coordinator, pservers: Sequence[PserverIndex]) -> set[Round]:
    """How far these pservers are."""
    answers = await asyncio.gather(
        *(get_from(coordinator, find_member(coordinator, index), STATE, {}) for index in pservers)
    )
    return {PserverState.model_validate_json(answer).round for answer in answers}
