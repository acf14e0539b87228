"""A checkpoint on request: a round is named that is not over anywhere, and every pserver writes its shard after it."""

from __future__ import annotations

import asyncio

import httpx

from ps_protocol.errors import GradpostError, NotReady, StaleRound, TryAgain
from ps_protocol.messages import CheckpointCreated
from ps_protocol.vocabulary import Round

from .control import want_checkpoint
from .coordinator import Coordinator
from .run import Run

TRIES = 12
WAIT_SECONDS = 20.0  # for a named round to be reached and written, before another is named
RETRY_SECONDS = 0.5


async def create_checkpoint(coordinator: Coordinator) -> CheckpointCreated:
    """Make a checkpoint of the whole model as it is now, or soon. Raises NotReady without a run, TryAgain.

    Rounds go on while they are being named: if one is over on some pserver, a later one is named.
    """
    cluster = coordinator.cluster
    run = cluster.run
    ahead = 0
    for _ in range(TRIES):
        if cluster.run is not run or run.state != "training":
            raise cluster.not_training()
        if not cluster.registry.is_complete:
            raise NotReady("a checkpoint needs every pserver", waiting_for=cluster.waiting_for)
        round_ = max(m.round for m in cluster.registry.members.values()) + ahead
        answers = await asyncio.gather(
            *(want_checkpoint(coordinator.http, m, run.name, round_) for m in cluster.registry.members.values()),
            return_exceptions=True,
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        late = [error.facts["current"] for error in errors if isinstance(error, StaleRound)]
        for error in errors:
            if not isinstance(error, GradpostError | httpx.HTTPError):
                raise error
        if not errors and await _wait_for(coordinator, run, round_):
            return CheckpointCreated(run=run.name, round=round_, place=coordinator.place.url)
        ahead = max([1, 2 * ahead, *(int(current) - round_ + 1 for current in late)]) if late else 0
        if not late:
            await asyncio.sleep(RETRY_SECONDS)  # somebody did not answer
    raise TryAgain(f"no round could be agreed on in {TRIES} tries")


async def _wait_for(coordinator: Coordinator, run: Run, round_: Round) -> bool:
    # Pservers tell of what they have written in their heartbeats.
    cluster = coordinator.cluster
    await coordinator.wait_until(
        lambda: cluster.run is not run or run.is_over or round_ in cluster.complete_checkpoints, WAIT_SECONDS
    )
    return cluster.run is run and round_ in cluster.complete_checkpoints
