"""The part of the coordinator's API that changes a run while it trains. It needs the scope `admin`."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from pydantic import Field

from ps_protocol import routes
from ps_protocol.fields import Count, Message, Name, OrdinalText, Real, Round
from ps_protocol.membership import Controls
from ps_protocol.messages import CheckpointCreated
from services.runtime.security import name_token

from .administration import Administration, ChangeDone
from .audit import MAX_LISTED, AuditEntry
from .coordinator import Coordinator


class SetRate(Message):
    """A learning rate for a parameter group, or for all of them; null lifts it."""

    rate: Real | None = Field(ge=0)
    group: Count | None = None


class RollBack(Message):
    """The round of a complete checkpoint."""

    round: Round


def add_administration_routes(app: FastAPI, coordinator: Coordinator) -> None:
    """Add them to the application."""
    administration = Administration(coordinator)

    @app.get(routes.CONTROLS, tags=["control"])
    async def controls() -> Controls:
        """What stands over what trainers push."""
        return administration.controls

    @app.post(routes.PAUSE, tags=["control"])
    async def pause(request: Request) -> ChangeDone:
        """Apply no round any more; trainers wait."""
        return await administration.pause(name_token(request.scope))

    @app.post(routes.RESUME, tags=["control"])
    async def resume(request: Request) -> ChangeDone:
        """Go on."""
        return await administration.resume(name_token(request.scope))

    @app.put(routes.RATE, tags=["control"])
    async def set_rate(request: Request, message: SetRate) -> ChangeDone:
        """Set a learning rate, whatever trainers push."""
        return await administration.set_rate(name_token(request.scope), message.rate, message.group)

    @app.put(routes.FROZEN, tags=["control"])
    async def freeze(request: Request, name: Name) -> ChangeDone:
        """Step a parameter no more, as if it had no gradient."""
        return await administration.freeze(name_token(request.scope), name, is_frozen=True)

    @app.delete(routes.FROZEN, tags=["control"])
    async def unfreeze(request: Request, name: Name) -> ChangeDone:
        """Step it again."""
        return await administration.freeze(name_token(request.scope), name, is_frozen=False)

    @app.post(routes.EVICT, tags=["control"])
    async def evict(request: Request, rank: OrdinalText) -> ChangeDone:
        """Go on without a trainer. Another life of it may join."""
        return await administration.evict(name_token(request.scope), rank)

    @app.post(routes.ROLL_BACK, tags=["control"])
    async def roll_back(request: Request, message: RollBack) -> ChangeDone:
        """Take everybody back to a checkpoint."""
        return await administration.roll_back(name_token(request.scope), message.round)

    @app.post(routes.CHECKPOINTS, tags=["control"])
    async def make_checkpoint(request: Request) -> CheckpointCreated:
        """Make a checkpoint of the whole model, and wait until it is complete."""
        return await administration.checkpoint(name_token(request.scope))

    @app.get(routes.AUDIT, tags=["inspection"])
    async def audit(limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100) -> list[AuditEntry]:
        """What administrators have asked for, and what became of it, oldest first."""
        return coordinator.audit.entries()[-limit:]
