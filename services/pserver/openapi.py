"""The OpenAPI descriptions of the binary endpoints, which FastAPI cannot derive from a signature."""

from __future__ import annotations

from typing import Any

from ps_protocol import norms
from ps_protocol.fence import FENCE_HEADER, FENCE_PATTERN, Fence
from ps_protocol.fields import MAX_NAME, MAX_ORDINAL, MAX_TENSORS
from ps_protocol.frames import CONTENT_TYPE
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
