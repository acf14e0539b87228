"""OpenAPI descriptions of the binary endpoints, which FastAPI cannot read off a signature."""

from __future__ import annotations

from typing import Any

from ps_protocol import norms
from ps_protocol.fence import HEADER_PATTERNS, Fence
from ps_protocol.fields import MAX_NAME, MAX_ORDINAL, MAX_TENSORS
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.messages import BarrierAnswer, NormAnswer, PushAnswer
from ps_protocol.requests import MAX_WAIT_SECONDS
from ps_protocol.routes import BARRIER_HEADER, HAVE_HEADER, NORM_HEADER, VERDICT_HEADER, WAIT_HEADER

_BINARY = {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_MAX_KEY = MAX_NAME + 100  # a parameter's name, with a slot and a block's number
_NAMES = {"type": "array", "maxItems": MAX_TENSORS, "items": {"type": "string", "maxLength": _MAX_KEY}}
_NAMES_BODY = {"required": False, "content": {"application/json": {"schema": _NAMES}}}
_EXAMPLE = Fence(
    protocol=1, run="5f0c", attempt=0, plan="9a1e", pserver=0, pserver_incarnation=1, rank=0, trainer_incarnation=1,
    round=1,
)  # fmt: skip


def _header(name: str, description: str, *, required: bool = False, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


_FENCE = [
    _header(name, f"part of the fence, such as {value}", required=True, type="string", pattern=HEADER_PATTERNS[name])
    for name, value in _EXAMPLE.to_headers().items()
]
_BARRIER = _header(BARRIER_HEADER, "the kind of the barrier", required=True, type="string", enum=["batch", "fetch"])
_CARRIED_BARRIER = {**_BARRIER, "required": False}
_VERDICT = _header(
    VERDICT_HEADER, "whether the trainer's gradient is finite, as far as the pservers have found",
    type="string", enum=["finite", "nonfinite"],
)  # fmt: skip
_NORM = _header(
    NORM_HEADER,
    "where gradients are clipped: digest, sum of squares of this shard and of all, separated by one space",
    type="string",
    maxLength=norms.MAX_TEXT,
    pattern="^[0-9A-Za-z]+ [!-~]+ [!-~]+$",
)
_WAIT = _header(WAIT_HEADER, "maximal time to wait, in seconds", type="number", minimum=0, maximum=MAX_WAIT_SECONDS)
_BASE = _header(
    HAVE_HEADER, "base version of the trainer: blocks that have not changed since are left out",
    type="integer", minimum=0, maximum=MAX_ORDINAL,
)  # fmt: skip


def _operation(parameters: list[dict[str, Any]], response: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"tags": ["tensors"], "parameters": [*_FENCE, *parameters], "responses": {"200": response}, **other}


def _answer(model: type[PushAnswer] | type[BarrierAnswer] | type[NormAnswer]) -> dict[str, Any]:
    return {"description": "done", "content": {"application/json": {"schema": model.model_json_schema()}}}


SEND_OPENAPI = _operation(
    [],
    _answer(PushAnswer),
    description="The body is a safetensors stream. The metadata of a contribution's last push contains `num_blocks` "
    "(the number of blocks that the trainer pushes to this pserver in this round) and `hyper_parameters` (JSON, one "
    "object for each group, and the state of a `GradScaler` if there is one). A push whose metadata contains `states` "
    "carries optimizer state.",
    requestBody={"required": True, "content": _BINARY},
)
GET_OPENAPI = _operation(
    [_CARRIED_BARRIER, _VERDICT, _BASE, _NORM, _WAIT],
    {"description": "exactly the version of the fence's round", "content": _BINARY},
    description="Waits for the round to be applied. The request may carry the batch barrier. The body may be a JSON "
    "list of block names; without one the answer is the whole shard.",
    requestBody=_NAMES_BODY,
)
SLOTS_OPENAPI = _operation(
    [],
    {"description": "slots as of the fence's round, float32", "content": _BINARY},
    description="The body is a JSON list of `{slot}/{block}`. Without one the answer's metadata contains the names of "
    "all slots (`slots`), and the states of the blocks that have been stepped (`states`).",
    requestBody=_NAMES_BODY,
)
BUFFERS_OPENAPI = _operation([], {"description": "all buffers of this pserver", "content": _BINARY})
NORM_OPENAPI = _operation(
    [_CARRIED_BARRIER, _VERDICT, _NORM, _WAIT],
    _answer(NormAnswer),
    description="Waits until the round's contributions are complete, or with the global norm until it is over. The "
    "request may carry the batch barrier.",
)
BARRIER_OPENAPI = _operation([_BARRIER, _VERDICT], _answer(BarrierAnswer))
