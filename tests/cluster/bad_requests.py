"""Everything that can be wrong with a request, as a table of requests that a running cluster refuses."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlencode

from ps_protocol import routes
from ps_protocol.plan import make_plan
from ps_protocol.requests import BARRIER_HEADER
from ps_protocol.vocabulary import PROTOCOL_VERSION, ParameterSpec

from .wire import NUMBERS, World, completion, encode_blocks, join_message, model_message

MIB = 1024 * 1024
LARGE = 10**400  # beyond a float
LIMITS = {"max_body_bytes": 48 * MIB, "max_header_bytes": 16 * MIB, "max_tensors": 1000, "min_block_size": 100}


@dataclass(frozen=True)
class Bad:
    """One bad request; `make` fills in what only the running cluster knows."""

    name: str
    error: str
    make: Callable[[World], Request]
    phase: str = "training"
    via: tuple[str, ...] = ("http", "bulk")


@dataclass(frozen=True)
class Request:
    path: str
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    content: Any = b""
    to: int | None = 0  # the pserver; None: the coordinator


CASES: list[Bad] = []


def bad(name: str, error: str, make: Callable[[World], Request], **options: Any) -> None:
    CASES.append(Bad(name, error, make, **options))


def send(
    body: bytes, rank: int = 0, round_: int = 2, path: str = routes.SEND, **changes: Any
) -> Callable[[World], Request]:
    return lambda w: Request(path, headers=w.trainers[rank].fence(round_), content=body)


def control(path: str, message: Any, *, method: str = "POST", to: int | None = None) -> Callable[[World], Request]:
    """Make a JSON message; a function of the world may stand for it, bytes are sent as they are."""

    def make(world: World) -> Request:
        value = message(world) if callable(message) else message
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        return Request(path, method, {"content-type": "application/json"}, content, to)

    return make


def honest(path: str, w: World, **changes: Any) -> Request:
    """Make a request that the pserver accepts now, but for the changes: of trainer 1, or an upload of trainer 0."""
    rank, round_ = (0, 0) if path == routes.INITIAL else (1, 2)
    headers = w.trainers[rank].fence(round_, **changes)
    body = b""
    if path == routes.BUFFERS:
        return Request(path, "GET", headers)
    if path in (routes.SEND, routes.INITIAL):
        body = encode_blocks(w.trainer.plan, w.own_blocks(), completion(len(w.own_blocks())))
    if path == routes.BARRIER:
        headers[BARRIER_HEADER] = "batch"
    return Request(path, headers=headers, content=body)


# The unit tests of fences try every header; here every route must check one.
for path in (routes.SEND, routes.INITIAL, routes.GET, routes.BARRIER, routes.BUFFERS):
    for change, error in (
        ({"protocol": PROTOCOL_VERSION + 1}, "unsupported_protocol"),
        ({"attempt": 1}, "stale_run"),
        ({"rank": 7}, "stale_trainer"),
        ({"trainer_incarnation": 99}, "stale_trainer"),
    ):
        bad(f"{path} other {next(iter(change))}", error, lambda w, p=path, c=change: honest(p, w, **c))
    for round_ in (3, 10**17) if path != routes.BUFFERS else ():
        bad(
            f"{path} round {round_}",
            "stale_trainer" if path == routes.INITIAL else "future_round",
            lambda w, p=path, r=round_: honest(p, w, round=r),
        )


bad("a get of a version that was overwritten", "stale_round", lambda w: Request(routes.GET, headers=w.trainer.fence(0)))
bad(
    "initial values from another than the uploader", "stale_trainer", send(b"{}", rank=1, round_=0, path=routes.INITIAL)
)


def frame(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(name: str = "w.block0", dtype: str = "F32", shape: tuple[int, ...] = (150,), size: int = 600) -> bytes:
    return frame({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}, bytes(size))


# Other frames that are wrong by themselves are in the unit tests of frames.
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
for name, error, body in (
    ("a pickle", "malformed_frame", b"\x05\x00\x00\x00\x00\x00\x00\x00\x80\x04K\x01."),
    ("a header above the limit", "body_too_large", struct.pack("<Q", LIMITS["max_header_bytes"] + 1) + b"{}"),
    ("too many tensors", "body_too_large", frame({f"t{i}": EMPTY for i in range(1001)})),
    ("a truncated frame", "malformed_frame", tensor()[:-1]),
    ("a frame with a rest", "malformed_frame", tensor() + b"x"),
    ("an unknown block", "unknown_block", tensor("absent.block0")),
    ("a wrong shape", "wrong_shape", tensor(shape=(149,), size=596)),
    ("integers of the same length", "wrong_dtype", tensor(dtype="I32")),
):
    bad(f"body: {name}", error, send(body, rank=1))
bad("initial body: a truncated frame", "malformed_frame", send(tensor()[:-1], round_=0, path=routes.INITIAL))


def of_pserver_1(w: World) -> Request:
    return Request(
        routes.SEND, headers=w.trainers[1].fence(2), content=encode_blocks(w.trainer.plan, w.trainer.plan.shards[1])
    )


bad("a block of another pserver", "unknown_block", of_pserver_1)
bad("a body above the limit", "body_too_large", send(bytes(LIMITS["max_body_bytes"] + 1), rank=1))
bad("a body larger than the shard", "body_too_large", send(bytes(LIMITS["max_header_bytes"] + MIB), rank=1))


def chunked(w: World) -> Request:
    async def pieces() -> AsyncIterator[bytes]:
        yield tensor()

    return Request(routes.SEND, headers=w.trainers[1].fence(2), content=pieces())


bad("no Content-Length", "length_required", chunked, via=("http",))
bad("no body", "malformed_frame", send(b"", rank=1), via=("http",))


def contribution(error: str, name: str, rank: int = 1, value: float = 1.0, **metadata: str | None) -> None:
    """Make the whole contribution to pserver 0, with other metadata or another value."""

    def make(w: World) -> Request:
        entries = {**completion(len(w.own_blocks())), **metadata}
        entries = {key: text for key, text in entries.items() if text is not None}
        body = encode_blocks(w.trainer.plan, w.own_blocks(), entries, value)
        return Request(routes.SEND, headers=w.trainers[rank].fence(2), content=body)

    bad(f"contribution: {name}", error, make)


contribution("contribution_conflict", "other bytes under the same identity", rank=0, value=2.0)
contribution(
    "contribution_conflict", "other hyperparameters", rank=0, hyper_parameters=json.dumps([{**NUMBERS[0], "lr": 1}])
)
contribution("contribution_conflict", "more blocks than it says", num_blocks="0")
contribution("malformed_frame", "num_blocks that is no number", num_blocks="many")
states = frame({"__metadata__": {"states": f'{{"w.block0":[0,false,{LARGE}]}}'}})
bad("slots: a large state", "malformed_frame", send(states, rank=1))
contribution("bad_hyper_parameters", "no hyperparameters", hyper_parameters=None)
contribution("bad_hyper_parameters", "hyperparameters of two groups", hyper_parameters=json.dumps(NUMBERS * 2))


def with_headers(
    path: str, rank: int = 1, content: bytes = b"", round_: int = 2, **headers: str
) -> Callable[[World], Request]:
    named = {f"gradpost-{name.replace('_', '-')}": value for name, value in headers.items()}
    return lambda w: Request(path, headers={**w.trainers[rank].fence(round_), **named}, content=content)


bad("a batch barrier without a contribution", "contribution_missing", with_headers(routes.BARRIER, barrier="batch"))
bad(
    "a batch barrier on a get without a contribution", "contribution_missing", with_headers(routes.GET, barrier="batch")
)
bad("a fetch barrier of the open round", "future_round", with_headers(routes.BARRIER, barrier="fetch"))
bad("a barrier of no kind", "bad_header", with_headers(routes.BARRIER))
bad("a barrier of another kind", "bad_header", with_headers(routes.BARRIER, rank=0, barrier="both"))
bad("a fetch barrier on a get", "bad_header", with_headers(routes.GET, rank=0, barrier="fetch"))
bad("a wait of 31 s", "bad_header", with_headers(routes.GET, rank=0, barrier="batch", wait_seconds="31"))
for content, error in (
    (b'["absent.block0"]', "unknown_block"),
    (b"[1]", "malformed_frame"),
    (b'["' + b"x" * 2 * MIB + b'"]', "body_too_large"),
):
    bad(f"names {content[:20]!r}", error, with_headers(routes.GET, rank=0, barrier="batch", content=content))


def installation(**changes: Any) -> Callable[[World], Any]:
    def make(w: World) -> Any:
        return {
            "run": "another", "attempt": 0, "plan": w.trainer.plan.as_json, "incarnation": 1,
            "consistency": {"mode": "sync"}, "nonfinite": "reject", "patience_seconds": 1, "uploader": 0,
            "number": 1, "membership": {"members": {"0": 1}},
            **changes,
        }  # fmt: skip

    return make


def same_run_other_plan(w: World) -> Any:
    plan = {**w.trainer.plan.as_json, "buffers": [["mean", [2], "F32", 0]]}
    return {**installation()(w), "run": w.trainer.ready.run, "plan": plan}


def installation_of(spec: ParameterSpec) -> Any:
    def make(w: World) -> Any:
        return {**installation()(w), "plan": make_plan([spec], 2, optimizer=w.trainer.plan.optimizer).as_json}

    return make


WIDE = ParameterSpec("wide", (LIMITS["max_body_bytes"] // 2,))
TALL = ParameterSpec("tall", (LIMITS["max_body_bytes"] // 3, 1), is_sparse=True)  # a push has an index for each value


for name, message, error in (
    ("a block that no frame can bring", installation_of(WIDE), "bad_model"),
    ("a block whose rows no frame can bring", installation_of(TALL), "bad_model"),
    ("a member that is unknown", installation(extra=1), "invalid_message"),
    ("an unknown mode", installation(consistency={"mode": "chaos"}), "invalid_message"),
    ("another life", installation(incarnation=7), "stale_pserver"),
    ("no plan", installation(plan={}), "bad_model"),
    ("another plan for the run", same_run_other_plan, "conflict"),
):
    bad(f"installation: {name}", error, control(routes.RUN, message, method="PUT", to=0))
bad("members: malformed", "invalid_message", control(routes.MEMBERS, {"run": "x"}, method="PUT", to=0))

bad("tensor endpoint: wrong method", "method_not_allowed", lambda w: Request(routes.SEND, "PUT", w.trainer.fence(2)))
for name, error, request in (
    ("pserver: unknown path", "not_found", Request("/v1/nothing")),
    ("coordinator: unknown path", "not_found", Request("/v1/nothing", to=None)),
    ("coordinator: wrong method", "method_not_allowed", Request(routes.STATUS, "DELETE", to=None)),
    ("blocks: unknown", "unknown_block", Request(routes.SHARD + "?name=absent.block0", "GET")),
    ("blocks: a large round", "invalid_message", Request(f"{routes.SHARD}?name=w.block0&round={LARGE}", "GET")),
    ("restorable: a long run", "invalid_message", Request(f"{routes.RESTORABLE}?run={'r' * 129}", "GET")),
    ("parameter: unknown", "not_found", Request(routes.PARAMETERS + "/absent", "GET", to=None)),
    ("parameter: a format", "invalid_message", Request(f"{routes.PARAMETERS}/w?format=npy", "GET", to=None)),
):
    bad(name, error, lambda w, request=request: request)

REGISTRATION = {
    "protocol": PROTOCOL_VERSION, "instance": "a new pserver", "address": "http://127.0.0.1:9", "http2": True,
}  # fmt: skip
for name, message, error in (
    ("other protocol", {**REGISTRATION, "protocol": 99}, "unsupported_protocol"),
    ("one too many", REGISTRATION, "index_taken"),
    ("an index beyond", {**REGISTRATION, "index": 2}, "world_mismatch"),
    ("an index that is taken", {**REGISTRATION, "index": 1}, "index_taken"),
    ("a short instance", {**REGISTRATION, "instance": "x"}, "invalid_message"),
):
    bad(f"registration: {name}", error, control(routes.REGISTER_PSERVER, message))
beat = {"incarnation": 9, "run": None, "round": 0}
bad("pserver heartbeat: another life", "stale_pserver", control(routes.PSERVER_HEARTBEAT.format(index=0), beat))

for name, message, error in (
    ("not text", b"\xff\xfe", "invalid_message"),
    ("a misspelt member", join_message("new", 0, worldsize=2), "invalid_message"),
    ("other protocol", join_message("new", 0, protocol=0), "unsupported_protocol"),
    ("WORLD_SIZE", join_message("new", 0, world_size=3), "world_mismatch"),
    ("a rank beyond", join_message("new", 2), "world_mismatch"),
    ("another mode", join_message("new", 0, expects={"mode": "async"}), "mode_mismatch"),
):
    for phase in ("gathering", "training"):
        bad(f"join while {phase}: {name}", error, control(routes.JOIN_TRAINER, message), phase=phase)
bad("join: a third trainer", "rank_taken", control(routes.JOIN_TRAINER, join_message("new", None)), phase="gathering")
bad("join: a rank that is taken", "rank_taken", control(routes.JOIN_TRAINER, join_message("new", 1)), phase="gathering")
bad("join: the run is under way", "not_ready", control(routes.JOIN_TRAINER, join_message("new", 1)))


def identity(w: World, **changes: Any) -> dict[str, Any]:
    return {"run": w.trainer.joined.run, "incarnation": w.trainer.joined.incarnation, **changes}


def plan_request(w: World, **changes: Any) -> Request:
    return Request(f"{routes.PLAN}?{urlencode({'rank': 0, **identity(w), **changes})}", "GET", to=None)


def leave_message(w: World, **changes: Any) -> dict[str, Any]:
    return identity(w, outcome="failed", **changes)


bad("plan: a large incarnation", "invalid_message", lambda w: plan_request(w, incarnation=LARGE))
for name, error, path, message in (
    ("heartbeat: a name that moves the cursor", "invalid_message", routes.TRAINER_HEARTBEAT.format(rank=0),
     partial(identity, round=1, results={"\x1b[2Aloss": 1})),
    ("leave: a long reason", "invalid_message", routes.LEAVE.format(rank=0), partial(leave_message, reason="x" * 2001)),
    ("leave: no outcome", "invalid_message", routes.LEAVE.format(rank=0), partial(identity, outcome="gone")),
    ("evict: a large rank", "invalid_message", routes.EVICT.format(rank=LARGE), {}),
    ("evict: no such trainer", "not_found", routes.EVICT.format(rank=9), {}),
    ("rollback: a large round", "invalid_message", routes.ROLL_BACK, {"round": LARGE}),
    ("rollback: no such checkpoint", "not_found", routes.ROLL_BACK, {"round": 1}),
):  # fmt: skip
    bad(name, error, control(path, message))
bad("freeze: no such parameter", "not_found", control("/v1/controls/frozen/absent", {}, method="PUT"))
for message in ({"rate": "0.5"}, {"rate": -1}, {"rate": 0.1, "group": 7}, b'{"rate": NaN}'):
    bad(f"rate: {message!r}", "invalid_message", control(routes.RATE, message, method="PUT"))


for path, more in ((routes.TRAINER_HEARTBEAT, {"round": 1}), (routes.LEAVE, {"outcome": "failed"})):
    at0, at7 = path.format(rank=0), path.format(rank=7)
    bad(f"{at0}: other run", "stale_run", control(at0, lambda w, m=more: identity(w, run="another", **m)))
    bad(f"{at0}: other life", "stale_trainer", control(at0, lambda w, m=more: identity(w, incarnation=99, **m)))
    bad(f"{at7}: unknown", "stale_trainer", control(at7, lambda w, m=more: identity(w, **m)))
    bad(f"{at0}: malformed", "invalid_message", control(at0, {}))
bad("plan: another run", "stale_run", lambda w: plan_request(w, run="another"))
bad("plan: too long a wait", "invalid_message", lambda w: plan_request(w, wait_seconds=1e9))
bad("parameters before the run", "not_ready", lambda w: Request(routes.PARAMETERS, "GET", to=None), phase="gathering")


bad("plan before all trainers have joined", "not_ready", plan_request, phase="gathering")


def declaration(error: str, name: str, phase: str = "gathering", rank: int = 1, **changes: Any) -> None:
    def make(w: World) -> Any:
        return model_message(w.trainers[rank].joined, **changes)

    bad(f"model: {name}", error, control(routes.DECLARE_MODEL.format(rank=rank), make), phase=phase)


# Every optimizer that is refused, and every model that cannot be planned, is in the unit tests.
declaration("unsupported_optimizer", "LBFGS", optimizer="LBFGS", group_flags=[{}])
declaration("unsupported_optimizer", "flags of another optimizer", group_flags=[{"amsgrad": False}])
declaration("invalid_message", "flags that are no booleans", group_flags=[{"nesterov": "perhaps", "maximize": False}])
declaration("bad_model", "more elements than there are", parameters=[["w", [2**62, 2**62], "F32", 0]])
declaration("bad_model", "a sparse parameter that is unknown", sparse=["absent"])
declaration("model_mismatch", "another shape", parameters=[["w", [3, 101], "F32", 0]])
declaration("model_mismatch", "another optimizer", optimizer="Adagrad", group_flags=[{"maximize": False}])
declaration("model_mismatch", "another policy", nonfinite="allow")
declaration("stale_run", "of another run", run="another")
declaration("stale_trainer", "of another life", incarnation=99)
declaration("model_mismatch", "another one than was planned", phase="training", nonfinite="allow")

CASES.sort(key=lambda case: case.phase)  # so that few runs are begun
