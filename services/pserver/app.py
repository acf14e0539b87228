"""HTTP API of a pserver: binary tensor endpoints, and control endpoints for the coordinator.

In a standby `Pserver` refuses all but the reads and the fail-over, with the address of the leader.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from fastapi import FastAPI, Response

from ps_protocol import norms, routes
from ps_protocol.fence import FENCE_HEADER, FENCE_PATTERN, Fence
from ps_protocol.fields import MAX_NAME, MAX_ORDINAL, MAX_TENSORS, Identifier, OrdinalText
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.membership import (
    Freeze,
    FrozenRounds,
    InstallMembers,
    InstallRun,
    PserverRegistered,
    RegisterPserver,
    WantCheckpoint,
)
from ps_protocol.messages import PserverState
from ps_protocol.requests import (
    BARRIER_HEADER,
    HAVE_HEADER,
    MAX_WAIT_SECONDS,
    NORM_HEADER,
    VERDICT_HEADER,
    WAIT_HEADER,
    BarrierAnswer,
    NormAnswer,
    PushAnswer,
)
from ps_protocol.standbys import FenceStandby
from ps_protocol.vocabulary import Round
from services.runtime.app import LargeReplies, add_raw_route, make_app
from services.runtime.metrics import ServiceMetrics

from .endpoints import TensorEndpoints
from .inspection import add_inspection_routes, describe_state
from .pserver import Pserver
from .replication import add_replication_routes


def make_pserver_app(pserver: Pserver, metrics: ServiceMetrics) -> FastAPI:
    """Return the application, which runs on the event loop that serves it."""
    app = make_app(
        title="Gradpost pserver", role="pserver", metrics=metrics,
        is_ready=lambda: pserver.missing,
    )  # fmt: skip
    tensors = TensorEndpoints(pserver)
    large = LargeReplies()
    for method, path, endpoint, summary, description in (
        ("POST", routes.SEND, tensors.push, "Push a bucket of gradient blocks", PUSH),
        ("POST", routes.INITIAL, tensors.initial, "Upload a bucket of initial values", PUSH),
        ("POST", routes.GET, tensors.pull, "Get one version of the shard", PULL),
        ("POST", routes.SLOTS, tensors.slots, "Get optimizer state", SLOTS),
        ("POST", routes.NORM, tensors.norm, "Get the norm of a round's gradient", NORM),
        ("POST", routes.BARRIER, tensors.barrier, "Count a batch or fetch barrier", BARRIER),
        ("GET", routes.BUFFERS, tensors.buffers, "Get this shard's buffers", BUFFERS),
    ):
        add_raw_route(app, path, endpoint, methods=[method], summary=summary, openapi_extra=description)

    @app.put(routes.RUN, tags=["control"], status_code=204, response_class=Response)
    async def install_run(message: InstallRun) -> None:
        """Start a run."""
        await pserver.install_run(message)

    @app.put(routes.FREEZE, tags=["control"])
    async def freeze(message: Freeze) -> FrozenRounds:
        """Begin a change of members: hold every barrier back, and return the progress of all trainers."""
        return await pserver.freeze(message)

    @app.get(routes.RESTORABLE, tags=["control"])
    async def restorable(
        run: Identifier, newest: OrdinalText | None = None, complete: bool = False
    ) -> list[tuple[Round, Round]]:
        """Return the ranges of rounds of a run to which this shard can go back, first and last.

        With `newest` this pserver has read the snapshot from which it would restore that round: in its folder, or if
        the checkpoint of that round is `complete`, in the shared storage.
        """
        return await pserver.find_restorable(run, newest, is_complete=complete)

    @app.put(routes.WANT_CHECKPOINT, tags=["control"], status_code=204, response_class=Response)
    async def want_checkpoint(message: WantCheckpoint) -> None:
        """Publish this shard's part of a checkpoint after a round."""
        await pserver.want_checkpoint(message)

    @app.put(routes.MEMBERS, tags=["control"], status_code=204, response_class=Response)
    async def install_members(message: InstallMembers) -> None:
        """Change the members of the run, or end it."""
        await pserver.install_members(message)

    @app.put(routes.FENCE_STANDBY, tags=["control"])
    async def fence_standby(message: FenceStandby) -> RegisterPserver:
        """Confirm and apply no update of an incarnation of the pserver, or an earlier one, from now on."""
        return await pserver.fence(message)

    @app.put(routes.PROMOTE_STANDBY, tags=["control"], status_code=204, response_class=Response)
    async def promote_standby(message: PserverRegistered) -> None:
        """Become the pserver, after a fence."""
        await pserver.promote(message)

    @app.get(routes.STATE, tags=["inspection"])
    async def state(digest: bool = False) -> PserverState:
        """Return the run, its barriers and counters; with `digest` also a digest of the whole state."""
        async with large.slot() if digest else nullcontext():
            return await describe_state(pserver, with_digest=digest)

    add_inspection_routes(app, pserver, large)
    add_replication_routes(app, pserver)
    return app


# ---------------------------------------------------------------------- the OpenAPI descriptions of binary endpoints

_BINARY = {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_MAX_KEY = MAX_NAME + 100  # a parameter's name, with a slot and a block's number
_NAMES = {"type": "array", "maxItems": MAX_TENSORS, "items": {"type": "string", "maxLength": _MAX_KEY}}
_NAMES_CONTENT = {"application/json": {"schema": _NAMES}}
_NAMES_BODY = {"required": False, "content": _NAMES_CONTENT}


def _header(name: str, description: str, *, required: bool = False, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


_FENCE = _header(
    FENCE_HEADER, f"the fence: {', '.join(Fence._fields)}", required=True, type="string",
    pattern=f"^{FENCE_PATTERN}$",
)  # fmt: skip
_BARRIER = _header(BARRIER_HEADER, "kind of the barrier", required=True, type="string", enum=["batch", "fetch"])
_CARRIED_BARRIER = {**_BARRIER, "required": False}
_VERDICT = _header(
    VERDICT_HEADER, "whether the trainer has found its gradient finite",
    type="string", enum=["finite", "nonfinite"],
)  # fmt: skip
_NORM = _header(
    NORM_HEADER,
    "with clipping: digest, sum of squares of this shard, sum of squares of all shards, separated by single spaces",
    type="string",
    maxLength=norms.MAX_TEXT,
    pattern="^[0-9A-Za-z]+ [!-~]+ [!-~]+$",
)
_WAIT = _header(WAIT_HEADER, "longest time to wait, in seconds", type="number", minimum=0, maximum=MAX_WAIT_SECONDS)
_BASE = _header(
    HAVE_HEADER, "base version of the trainer: blocks that have not changed since are left out",
    type="integer", minimum=0, maximum=MAX_ORDINAL,
)  # fmt: skip


def _operation(parameters: list[dict[str, Any]], response: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"tags": ["tensors"], "parameters": [_FENCE, *parameters], "responses": {"200": response}, **other}


def _answer(model: type[PushAnswer] | type[BarrierAnswer] | type[NormAnswer]) -> dict[str, Any]:
    return {"description": "done", "content": {"application/json": {"schema": model.model_json_schema()}}}


PUSH = _operation(
    [],
    _answer(PushAnswer),
    description="The body is a safetensors stream. The metadata of a contribution's last push contains `num_blocks` "
    "(the number of blocks that the trainer pushes to this pserver in this round) and `hyper_parameters` (JSON, one "
    "object for each group). A push whose metadata contains `states` carries optimizer state.",
    requestBody={"required": True, "content": _BINARY},
)
PULL = _operation(
    [_CARRIED_BARRIER, _VERDICT, _BASE, _NORM, _WAIT],
    {"description": "the version of the fence's round", "content": _BINARY},
    description="Waits for the round to be applied. The request may carry the batch barrier. The body may be a JSON "
    "list of block names; without one the answer is the whole shard. It may be a push instead, which is staged first.",
    requestBody={"required": False, "content": {**_NAMES_CONTENT, **_BINARY}},
)
SLOTS = _operation(
    [],
    {"description": "slots as of the fence's round, float32", "content": _BINARY},
    description="The body is a JSON list of `{slot}/{block}`. Without one the answer's metadata contains the names of "
    "all slots (`slots`), and the states of the blocks that have been stepped (`states`).",
    requestBody=_NAMES_BODY,
)
BUFFERS = _operation([], {"description": "all buffers of this pserver", "content": _BINARY})
NORM = _operation(
    [_CARRIED_BARRIER, _VERDICT, _NORM, _WAIT],
    _answer(NormAnswer),
    description="Waits until the round's contributions are complete, or with the global norm until it is over. The "
    "request may carry the batch barrier.",
)
BARRIER = _operation([_BARRIER, _VERDICT], _answer(BarrierAnswer))
