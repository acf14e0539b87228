"""The coordinator's requests to pservers."""

from __future__ import annotations

import httpx

from ps_config.control_client import send_message
from ps_protocol.fields import Message
from ps_protocol.membership import WantCheckpoint
from ps_protocol.messages import PserverState
from ps_protocol.routes import STATE, WANT_CHECKPOINT
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.logs import get_logger

from .state.pservers import PserverMember

log = get_logger()

TIMEOUT_SECONDS = 5.0
RESULT_SECONDS = 60.0  # for a request to wait for the checkpoint of a finished run


class WaitLog:
    """The log of pservers that do not answer: one line for each, and another after an answer or for another reason."""

    def __init__(self) -> None:
        self._reasons: dict[PserverIndex, str] = {}

    def note(self, index: PserverIndex, error: BaseException | None) -> None:
        """Note why a pserver did not answer; None: it has answered."""
        reason = "" if error is None else str(error) or type(error).__name__
        if reason and self._reasons.get(index) != reason:
            log.warning(f"waiting for pserver {index}", reason=reason)
        self._reasons[index] = reason


async def call_pserver(
    http: httpx.AsyncClient,
    member: PserverMember,
    method: str,
    route: str,
    message: Message | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> bytes:
    """Return the body of an answer. Raises the GradpostError that it contains, or httpx.TransportError."""
    return await send_message(http, method, member.info.address + route, message, timeout=timeout)


async def want_checkpoint(
    http: httpx.AsyncClient, member: PserverMember, run: str, round_: Round, *, is_over: bool = False
) -> None:
    """Request a pserver's shard of a checkpoint after a round. Raises StaleRound if the pserver has passed it."""
    await call_pserver(http, member, "PUT", WANT_CHECKPOINT, WantCheckpoint(run=run, round=round_, is_over=is_over))


async def read_state(http: httpx.AsyncClient, member: PserverMember) -> PserverState:
    """Return the state of a pserver. Raises the errors of `call_pserver`, and ValueError for a proxy's page."""
    return PserverState.from_answer(await call_pserver(http, member, "GET", STATE))
