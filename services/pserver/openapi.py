"""OpenAPI descriptions of the binary endpoints, which FastAPI cannot read off a signature."""

from __future__ import annotations

from typing import Any

from ps_protocol import norms
from ps_protocol.fence import HEADER_PATTERNS, Fence
from ps_protocol.fields import MAX_NAME, MAX_ORDINAL, MAX_TENSORS
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.messages import BarrierAnswer, NormAnswer, PushAnswer
from ps_protocol.routes import BARRIER_HEADER, HAVE_HEADER, NORM_HEADER, VERDICT_HEADER, WAIT_HEADER

from .endpoints import MAX_WAIT_SECONDS

_BINARY = {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_NAMES = {
    "type": "array",
    "maxItems": MAX_TENSORS,
    "items": {"type": "string", "maxLength": MAX_NAME + 100},  # of a parameter, with a slot and a block's number
}


def _header(name: str, description: str, *, schema: dict[str, Any], required: bool = True) -> Any:
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


_EXAMPLE = Fence(
    protocol=1, run="5f0c", attempt=0, plan="9a1e", pserver=0, pserver_incarnation=1, rank=0, trainer_incarnation=1,
    round=1,
)  # fmt: skip
_FENCE = [
    _header(name, f"part of the fence, such as {value}", schema={"type": "string", "pattern": HEADER_PATTERNS[name]})
    for name, value in _EXAMPLE.to_headers().items()
]
_BARRIER = _header(BARRIER_HEADER, "which barrier", schema={"type": "string", "enum": ["batch", "fetch"]})
_VERDICT = _header(
    VERDICT_HEADER, "whether the trainer's gradient is finite, as far as the pservers have found", required=False,
    schema={"type": "string", "enum": ["finite", "nonfinite"]},
)  # fmt: skip


_NORM = _header(
    NORM_HEADER, "where gradients are clipped: digest, sum of squares here and everywhere, one space between them",
    required=False,
    schema={"type": "string", "maxLength": norms.MAX_TEXT, "pattern": "^[0-9A-Za-z]+ [!-~]+ [!-~]+$"},
)  # fmt: skip
_WAIT = _header(
    WAIT_HEADER, "how long to wait at most, in seconds", required=False,
    schema={"type": "number", "minimum": 0, "maximum": MAX_WAIT_SECONDS},
)  # fmt: skip


def _json_answer(model: type[PushAnswer] | type[BarrierAnswer] | type[NormAnswer]) -> dict[str, Any]:
    return {"200": {"description": "done", "content": {"application/json": {"schema": model.model_json_schema()}}}}


SEND_OPENAPI: dict[str, Any] = {
    "tags": ["tensors"],
    "description": "The body is a safetensors stream. The metadata of a contribution's last push holds `num_blocks` "
    "(how many blocks the trainer sent here in this round) and `hyper_parameters` (JSON, one object a group, and the "
    "state of a `GradScaler` if there is one). A push whose metadata holds `states` brings slots.",
    "parameters": _FENCE,
    "requestBody": {"required": True, "content": _BINARY},
    "responses": _json_answer(PushAnswer),
}
GET_OPENAPI: dict[str, Any] = {
    "tags": ["tensors"],
    "description": "Waits for the round to be applied. The batch barrier may ride on it. The body may be a JSON list "
    "of block names; without one the whole shard is answered.",
    "parameters": [
        *_FENCE,
        {**_BARRIER, "required": False},
        _VERDICT,
        _header(
            HAVE_HEADER,
            "the round whose values the trainer has: what has not changed since is left out",
            required=False,
            schema={"type": "integer", "minimum": 0, "maximum": MAX_ORDINAL},
        ),
        _NORM,
        _WAIT,
    ],
    "requestBody": {"required": False, "content": {"application/json": {"schema": _NAMES}}},
    "responses": {"200": {"description": "exactly the version of the fence's round", "content": _BINARY}},
}
SLOTS_OPENAPI: dict[str, Any] = {
    "tags": ["tensors"],
    "description": "The body is a JSON list of `{slot}/{block}`. Without one the answer's metadata says what there is: "
    "`slots` are their names, `states` those of the blocks that have been stepped.",
    "parameters": _FENCE,
    "requestBody": {"required": False, "content": {"application/json": {"schema": _NAMES}}},
    "responses": {"200": {"description": "slots as of the fence's round, float32", "content": _BINARY}},
}
BUFFERS_OPENAPI: dict[str, Any] = {
    "tags": ["tensors"],
    "parameters": _FENCE,
    "responses": {"200": {"description": "all buffers of this pserver", "content": _BINARY}},
}
NORM_OPENAPI: dict[str, Any] = {
    "tags": ["tensors"],
    "description": "Waits until the round's contributions are complete, or with the global norm until it is over. The "
    "batch barrier may ride on it.",
    "parameters": [*_FENCE, {**_BARRIER, "required": False}, _VERDICT, _NORM, _WAIT],
    "responses": _json_answer(NormAnswer),
}
BARRIER_OPENAPI: dict[str, Any] = {
    "tags": ["tensors"],
    "parameters": [*_FENCE, _BARRIER, _VERDICT],
    "responses": _json_answer(BarrierAnswer),
}
