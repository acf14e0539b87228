"""Everything that can be wrong with a request, as a table of requests that a running cluster refuses."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ps_protocol.fence import Fence
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.routes import (
    BARRIER,
    BARRIER_HEADER,
    BLOCKS,
    BUFFERS,
    DECLARE_MODEL,
    EVICT,
    GET,
    INITIAL,
    JOIN_TRAINER,
    LEAVE,
    MEMBERS,
    METRICS,
    PARAMETERS,
    PLAN,
    PSERVER_HEARTBEAT,
    RATE,
    REGISTER_PSERVER,
    RESTORABLE,
    ROLL_BACK,
    RUN,
    SEND,
    STATE,
    STATUS,
    TRAINER_HEARTBEAT,
)
from ps_protocol.vocabulary import PROTOCOL_VERSION, ParameterSpec
from trainer_client.testing import LocalCluster

from .wire import NUMBERS, WireTrainer, completion, encode_blocks, join_message, model_message

MIB = 1024 * 1024
LARGE = 10**400  # beyond a float
LIMITS = {"max_body_bytes": 48 * MIB, "max_header_bytes": 16 * MIB, "max_tensors": 1000}

# ---------------------------------------------------------------- the world in which it is sent


@dataclass
class World:
    """A cluster with a run that is gathering or training, and what must not change in it.

    While it trains: round 1 is applied; trainer 0 has pushed all of round 2 without its barrier, trainer 1 nothing.
    """

    cluster: LocalCluster
    http: httpx.AsyncClient  # HTTP/1.1
    bulk: httpx.AsyncClient  # HTTP/2, as trainers send tensors
    phase: str = ""
    num_phases: int = 0
    trainers: list[WireTrainer] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    before: Any = None

    async def enter(self, phase: str, **model: Any) -> None:
        """Begin a new run, unless this one is in that phase."""
        if self.phase == phase:
            return
        for trainer in self.trainers:
            await trainer.leave()
        self.phase, self.num_phases = phase, self.num_phases + 1
        self.trainers = [WireTrainer(self.http, self.cluster.address) for _ in range(2)]
        for rank, trainer in enumerate(self.trainers):
            await trainer.join(f"{self.num_phases}.{rank}", rank)
        await self.trainers[0].declare(**model)
        if phase != "gathering":
            await self.trainers[1].declare(**model)
            await self._train()
        async with asyncio.timeout(30):
            while len(self.addresses) < self.cluster.num_pservers:
                # What a pserver is it says with its first heartbeat.
                self.addresses = [p.address for p in self.cluster.status().pservers if p.software is not None]
                await asyncio.sleep(0.01)
        self.before = await self.look()

    async def _train(self) -> None:
        for trainer in self.trainers:
            await trainer.wait_for_plan()
        await self.trainers[0].upload_initial()
        for trainer in self.trainers:
            await trainer.get(0)
            await trainer.push(1)
        for trainer in self.trainers:
            await trainer.barrier(1)
        for trainer in self.trainers:
            await trainer.get(1)
        await self.trainers[0].push(2)

    async def look(self) -> Any:
        """Everything that a bad request could have changed."""
        status = (await self.http.get(self.cluster.address + STATUS)).json()
        for member in (*status["pservers"], *status["trainers"]):
            del member["heartbeat_age_seconds"]
        for pserver in status["pservers"]:
            del pserver["round"], pserver["waiting_seconds"]  # as of its last heartbeat
        del status["round"]
        states = []
        for address in self.addresses:
            state = (await self.http.get(address + STATE, params={"digest": True})).json()
            assert self.phase == "gathering" or state["digest"]
            del state["transports"], state["waiting_seconds"]
            states.append(state)
        return status, states

    @property
    def trainer(self) -> WireTrainer:
        return self.trainers[0]

    def own_blocks(self) -> Any:
        """Blocks of pserver 0."""
        return self.trainer.plan.shards[0]

    async def metric(self, address: str, name: str) -> float:
        text = (await self.http.get(address + METRICS)).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    return sample.value
        raise KeyError(name)

    async def wait_for_used_bytes(self, expected: float) -> None:
        """Wait until the receive buffers of pserver 0 that are in use have so many bytes."""
        async with asyncio.timeout(10):
            while await self.metric(self.addresses[0], "gradpost_staged_bytes") != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


# ---------------------------------------------------------------- what is sent


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


def send(body: bytes, rank: int = 0, round_: int = 2, path: str = SEND, **changes: Any) -> Callable[[World], Request]:
    return lambda w: Request(path, headers=w.trainers[rank].fence(round_, **changes), content=body)


def control(path: str, message: Any, *, method: str = "POST", to: int | None = None) -> Callable[[World], Request]:
    """A JSON message; a function of the world may stand for it, bytes are sent as they are."""

    def make(world: World) -> Request:
        value = message(world) if callable(message) else message
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        return Request(path, method, {"content-type": "application/json"}, content, to)

    return make


# ---------------------------------------------------------------- the fence, on every endpoint


def honest(path: str, w: World, **changes: Any) -> Request:
    """What trainer 1 could send now (an upload of initial values comes from trainer 0), but for the changes."""
    rank, round_ = (0, 0) if path == INITIAL else (1, 2)
    headers = w.trainers[rank].fence(round_, **changes)
    body = b""
    if path == BUFFERS:
        return Request(path, "GET", headers)
    if path in (SEND, INITIAL):
        body = encode_blocks(w.trainer.plan, w.own_blocks(), completion(len(w.own_blocks())))
    if path == BARRIER:
        headers[BARRIER_HEADER] = "batch"
    return Request(path, headers=headers, content=body)


for path in (SEND, INITIAL, GET, BARRIER, BUFFERS):
    for change, error in (
        ({"protocol": PROTOCOL_VERSION + 1}, "unsupported_protocol"),
        ({"run": "another"}, "stale_run"),
        ({"attempt": 1}, "stale_run"),
        ({"plan": "0" * 32}, "plan_mismatch"),
        ({"pserver": 1}, "stale_pserver"),
        ({"pserver_incarnation": 2}, "stale_pserver"),
        ({"rank": 7}, "stale_trainer"),
        ({"trainer_incarnation": 99}, "stale_trainer"),
    ):
        bad(f"{path} other {next(iter(change))}", error, lambda w, p=path, c=change: honest(p, w, **c))
    for round_ in (3, 10**17) if path != BUFFERS else ():
        bad(
            f"{path} round {round_}",
            "stale_trainer" if path == INITIAL else "future_round",
            lambda w, p=path, r=round_: honest(p, w, round=r),
        )

for header in Fence(0, "", 0, "", 0, 0, 0, 0, 0).to_headers():

    def without(w: World, header: str = header) -> Request:
        request = honest(SEND, w)
        del request.headers[header]
        return request

    def garbled(w: World, header: str = header) -> Request:
        request = honest(SEND, w)
        request.headers[header] = "x" * 200
        return request

    bad(f"without {header}", "bad_header", without)
    bad(f"garbled {header}", "bad_header", garbled)
for value in ("-1", "1.0", "", "9" * 19, "+1", "0x1"):

    def at(w: World, value: str = value) -> Request:
        return Request(SEND, headers={**w.trainer.fence(2), "gradpost-round": value}, content=b"{}")

    bad(f"round {value!r}", "bad_header", at)

bad("a get of a version that was overwritten", "stale_round", lambda w: Request(GET, headers=w.trainer.fence(0)))
bad("initial values from another than the uploader", "stale_trainer", send(b"{}", rank=1, round_=0, path=INITIAL))

# ---------------------------------------------------------------- bodies


def frame(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(name: str = "w.block0", dtype: str = "F32", shape: tuple[int, ...] = (150,), size: int = 600) -> bytes:
    return frame({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}, bytes(size))


W0 = {"dtype": "F32", "shape": [150], "data_offsets": [0, 600]}
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
for name, error, body in (
    ("garbage", "body_too_large", bytes(range(200, 0, -1))),
    ("a pickle", "malformed_frame", b"\x05\x00\x00\x00\x00\x00\x00\x00\x80\x04K\x01."),
    ("seven bytes", "malformed_frame", bytes(7)),
    ("a header bomb", "body_too_large", struct.pack("<Q", 2**63) + b"{}"),
    ("a header above the limit", "body_too_large", struct.pack("<Q", LIMITS["max_header_bytes"] + 1) + b"{}"),
    ("a header longer than the body", "malformed_frame", struct.pack("<Q", 1000) + b"{}"),
    ("a header that is no JSON", "malformed_frame", frame(b"{w: 1}")),
    ("a header that is no text", "malformed_frame", frame(b"{\xff\xfe}")),
    ("a header that is a list", "malformed_frame", frame([])),
    ("a deep header", "malformed_frame", frame(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    ("a number of a million digits", "malformed_frame", frame(b'{"w":' + b"9" * MIB + b"}")),
    ("too many tensors", "body_too_large", frame({f"t{i}": EMPTY for i in range(1001)})),
    ("a name twice", "malformed_frame", frame(b'{"w":%b,"w":%b}' % ((json.dumps(W0).encode(),) * 2), bytes(600))),
    ("half a surrogate pair", "malformed_frame", frame(b'{"\\ud800":%b}' % json.dumps(W0).encode(), bytes(600))),
    ("a truncated frame", "malformed_frame", tensor()[:-1]),
    ("a frame with a rest", "malformed_frame", tensor() + b"x"),
    ("a hole", "malformed_frame", frame({"w.block0": {**W0, "data_offsets": [4, 604]}}, bytes(604))),
    ("an overlap", "malformed_frame", frame({"w.block0": W0, "b.block0": W0}, bytes(600))),
    ("offsets that do not fit", "malformed_frame", frame({"w.block0": {**W0, "shape": [149]}}, bytes(600))),
    ("a negative shape", "malformed_frame", frame({"w.block0": {**W0, "shape": [-150]}}, bytes(600))),
    ("a shape that overflows", "malformed_frame", frame({"w.block0": {**W0, "shape": [2**62, 2**62]}}, bytes(600))),
    ("a dtype that is none", "malformed_frame", tensor(dtype="FLOAT")),
    ("metadata that is no text", "malformed_frame", frame({"__metadata__": {"num_blocks": 3}})),
    ("an unknown block", "unknown_block", tensor("nobody.block0")),
    ("a parameter instead of a block", "unknown_block", tensor("w")),
    ("a wrong shape", "wrong_shape", tensor(shape=(149,), size=596)),
    ("another number of dimensions", "wrong_shape", tensor(shape=(150, 1))),
    ("a scalar", "wrong_shape", tensor(shape=(), size=4)),
    ("no elements", "wrong_shape", tensor(shape=(0,), size=0)),
    ("float64", "wrong_dtype", tensor(dtype="F64", size=1200)),
    ("bfloat16", "wrong_dtype", tensor(dtype="BF16", size=300)),
    ("integers of the same length", "wrong_dtype", tensor(dtype="I32")),
):  # fmt: skip
    bad(f"body: {name}", error, send(body, rank=1))
    if error != "malformed_frame":
        continue
    bad(f"initial body: {name}", error, send(body, round_=0, path=INITIAL))


def of_pserver_1(w: World) -> Request:
    return Request(
        SEND, headers=w.trainers[1].fence(2), content=encode_blocks(w.trainer.plan, w.trainer.plan.shards[1])
    )


bad("a block of another pserver", "unknown_block", of_pserver_1)
bad("a body above the limit", "body_too_large", send(bytes(LIMITS["max_body_bytes"] + 1), rank=1))
bad("a body larger than the shard", "body_too_large", send(bytes(LIMITS["max_header_bytes"] + MIB), rank=1))


def chunked(w: World) -> Request:
    async def pieces() -> AsyncIterator[bytes]:
        yield tensor()

    return Request(SEND, headers=w.trainers[1].fence(2), content=pieces())


bad("no Content-Length", "length_required", chunked, via=("http",))
bad("no body", "malformed_frame", send(b"", rank=1), via=("http",))


def contribution(error: str, name: str, rank: int = 1, value: float = 1.0, **metadata: str | None) -> None:
    """The whole contribution to pserver 0, with other metadata or another value."""

    def make(w: World) -> Request:
        entries = {**completion(len(w.own_blocks())), **metadata}
        entries = {key: text for key, text in entries.items() if text is not None}
        body = encode_blocks(w.trainer.plan, w.own_blocks(), entries, value)
        return Request(SEND, headers=w.trainers[rank].fence(2), content=body)

    bad(f"contribution: {name}", error, make)


contribution("non_finite_gradient", "NaN", value=float("nan"))
contribution("non_finite_gradient", "inf", value=float("inf"))
contribution("non_finite_gradient", "-inf", value=float("-inf"))
contribution("contribution_conflict", "other bytes under the same identity", rank=0, value=2.0)
contribution(
    "contribution_conflict", "other hyper-parameters", rank=0, hyper_parameters=json.dumps([{**NUMBERS[0], "lr": 1}])
)
contribution("contribution_conflict", "another number of blocks", rank=0, num_blocks="17")
contribution("contribution_conflict", "more blocks than it says", num_blocks="0")
for text in ("-1", "1.5", "many", "", "9" * 30):
    contribution("malformed_frame", f"num_blocks {text!r}", num_blocks=text)
for state in (f"[0,false,{LARGE}]", f"[{LARGE},false,1]", "[0,0,1]"):
    states = frame({"__metadata__": {"states": f'{{"w.block0":{state}}}'}})
    bad(f"slots: state {state[:20]}", "malformed_frame", send(states, rank=1))
contribution("bad_hyper_parameters", "no hyper-parameters", hyper_parameters=None)
for text in (
    "lr=0.1", "[" * 50_000, "null", "[]", "{}", "[{}]", json.dumps(NUMBERS * 2), "[null]",
    *(json.dumps([{**NUMBERS[0], "lr": lr}]) for lr in (float("nan"), float("inf"), -1, "1", None, [], True, 10**400)),
    json.dumps([{**NUMBERS[0], "betas": [0.9, 0.99]}]),
    json.dumps([{"after": 0, "scale": 8.0, "growth_tracker": 0}]),
    json.dumps([*NUMBERS, {"after": 0, "scale": LARGE, "growth_tracker": 0}]),
    json.dumps([{key: value for key, value in NUMBERS[0].items() if key != "momentum"}]),
):  # fmt: skip
    contribution("bad_hyper_parameters", f"hyper-parameters {text[:60]}", hyper_parameters=text)

# ---------------------------------------------------------------- barriers and gets


def with_headers(
    path: str, rank: int = 1, content: bytes = b"", round_: int = 2, **headers: str
) -> Callable[[World], Request]:
    named = {f"gradpost-{name.replace('_', '-')}": value for name, value in headers.items()}
    return lambda w: Request(path, headers={**w.trainers[rank].fence(round_), **named}, content=content)


bad("a batch barrier without a contribution", "contribution_missing", with_headers(BARRIER, barrier="batch"))
bad("a batch barrier on a get without a contribution", "contribution_missing", with_headers(GET, barrier="batch"))
bad("a fetch barrier of the open round", "future_round", with_headers(BARRIER, barrier="fetch"))
bad("a barrier of no kind", "bad_header", with_headers(BARRIER))
bad("a barrier of another kind", "bad_header", with_headers(BARRIER, rank=0, barrier="both"))
bad("a fetch barrier on a get", "bad_header", with_headers(GET, rank=0, barrier="fetch"))
for text in ("soon", "-1", "nan", "inf", "31", ""):
    bad(f"wait {text!r}", "bad_header", with_headers(GET, rank=0, barrier="batch", wait_seconds=text))
for content, error in (
    (b'["nobody.block0"]', "unknown_block"),
    (b'{"w.block0": 1}', "malformed_frame"),
    (b"[1]", "malformed_frame"),
    (b"[", "malformed_frame"),
    (b"\xff", "malformed_frame"),
    (b"[" * 100_000, "malformed_frame"),
    (b'["' + b"x" * 2 * MIB + b'"]', "body_too_large"),
):
    bad(f"names {content[:20]!r}", error, with_headers(GET, rank=0, barrier="batch", content=content))

# ---------------------------------------------------------------- control messages


def installation(**changes: Any) -> Callable[[World], Any]:
    def make(w: World) -> Any:
        return {
            "run": "another", "attempt": 0, "plan": w.trainer.ready.plan, "incarnation": 1,
            "consistency": {"mode": "sync"}, "nonfinite": "reject", "round_timeout_seconds": 1, "uploader": 0,
            "number": 1, "members": {"0": 1},
            **changes,
        }  # fmt: skip

    return make


def same_run_other_plan(w: World) -> Any:
    plan = {**w.trainer.ready.plan, "buffers": [["mean", [2], "F32", 0]]}
    return {**installation()(w), "run": w.trainer.ready.run, "plan": plan}


def large_block(w: World) -> Any:
    wide = ParameterSpec("wide", (LIMITS["max_body_bytes"] // 2,))
    plan = make_plan([wide], 2, optimizer=SlicePlan.from_json(w.trainer.ready.plan).optimizer)
    return {**installation()(w), "plan": plan.to_json()}


for name, message, error in (
    ("a block that no frame can bring", large_block, "bad_model"),
    ("malformed", b"{", "invalid_message"),
    ("no object", [], "invalid_message"),
    ("no members", {}, "invalid_message"),
    ("a member that is unknown", installation(extra=1), "invalid_message"),
    ("an unknown mode", installation(consistency={"mode": "chaos"}), "invalid_message"),
    ("another life", installation(incarnation=7), "stale_pserver"),
    ("no plan", installation(plan={}), "bad_model"),
    ("another plan for the run", same_run_other_plan, "conflict"),
):
    bad(f"installation: {name}", error, control(RUN, message, method="PUT", to=0))
bad("members: malformed", "invalid_message", control(MEMBERS, {"run": "x"}, method="PUT", to=0))

for to in (0, None):
    who = "coordinator" if to is None else "pserver"
    bad(f"{who}: unknown path", "not_found", lambda w, t=to: Request("/v1/nothing", to=t))
    bad(
        f"{who}: wrong method",
        "method_not_allowed",
        lambda w, t=to: Request(STATE if t == 0 else STATUS, "DELETE", to=t),
    )
bad("tensor endpoint: wrong method", "method_not_allowed", lambda w: Request(SEND, "PUT", w.trainer.fence(2)))
bad("blocks: unknown", "unknown_block", lambda w: Request(BLOCKS + "?name=nobody.block0", "GET"))
bad("blocks: no name", "invalid_message", lambda w: Request(BLOCKS, "GET"))
bad("blocks: a large round", "invalid_message", lambda w: Request(f"{BLOCKS}?name=w.block0&round={LARGE}", "GET"))
bad("restorable: a long run", "invalid_message", lambda w: Request(f"{RESTORABLE}?run={'r' * 129}", "GET"))

# ---------------------------------------------------------------- the coordinator, while training

REGISTRATION = {
    "protocol": PROTOCOL_VERSION, "instance": "a new pserver", "address": "http://127.0.0.1:9", "http2": True,
}  # fmt: skip
for name, message, error in (
    ("malformed", b"{", "invalid_message"),
    ("other protocol", {**REGISTRATION, "protocol": 99}, "unsupported_protocol"),
    ("one too many", REGISTRATION, "index_taken"),
    ("an index beyond", {**REGISTRATION, "index": 2}, "world_mismatch"),
    ("an index that is taken", {**REGISTRATION, "index": 1}, "index_taken"),
    ("a negative index", {**REGISTRATION, "index": -1}, "invalid_message"),
    ("a short instance", {**REGISTRATION, "instance": "x"}, "invalid_message"),
):
    bad(f"registration: {name}", error, control(REGISTER_PSERVER, message))
beat = {"incarnation": 9, "run": None, "round": 0}
bad("pserver heartbeat: another life", "stale_pserver", control(PSERVER_HEARTBEAT.format(index=0), beat))
bad("pserver heartbeat: unknown", "stale_pserver", control(PSERVER_HEARTBEAT.format(index=7), beat))
bad("pserver heartbeat: no index", "invalid_message", control(PSERVER_HEARTBEAT.format(index="x"), beat))

for name, message, error in (
    ("malformed", b'{"protocol": 1,', "invalid_message"),
    ("not text", b"\xff\xfe", "invalid_message"),
    ("a misspelt member", join_message("new", 0, worldsize=2), "invalid_message"),
    ("a negative rank", join_message("new", -1), "invalid_message"),
    ("other protocol", join_message("new", 0, protocol=0), "unsupported_protocol"),
    ("WORLD_SIZE", join_message("new", 0, world_size=3), "world_mismatch"),
    ("a rank beyond", join_message("new", 2), "world_mismatch"),
    ("another mode", join_message("new", 0, expects={"mode": "async"}), "mode_mismatch"),
):
    for phase in ("gathering", "training"):
        bad(f"join while {phase}: {name}", error, control(JOIN_TRAINER, message), phase=phase)
bad("join: a third trainer", "rank_taken", control(JOIN_TRAINER, join_message("new", None)), phase="gathering")
bad("join: a rank that is taken", "rank_taken", control(JOIN_TRAINER, join_message("new", 1)), phase="gathering")
bad("join: the run is under way", "not_ready", control(JOIN_TRAINER, join_message("new", 1)))


def identity(w: World, **changes: Any) -> dict[str, Any]:
    return {"run": w.trainer.joined.run, "incarnation": w.trainer.joined.incarnation, **changes}


def plan_request(w: World, **changes: Any) -> Request:
    return Request(f"{PLAN}?{urlencode({'rank': 0, **identity(w), **changes})}", "GET", to=None)


def leave_message(w: World, **changes: Any) -> dict[str, Any]:
    return identity(w, outcome="failed", **changes)


def heartbeat(name: str, **changes: Any) -> None:
    """A heartbeat of trainer 0 that is refused, and changes nothing."""
    path = TRAINER_HEARTBEAT.format(rank=0)
    bad(f"heartbeat: {name}", "invalid_message", control(path, lambda w: {**identity(w, round=1), **changes}))


heartbeat("a large round", round=LARGE)
heartbeat("a round that is true", round=True)
heartbeat("a round that is text", round="1")
heartbeat("a round that is a fraction", round=1.0)
heartbeat("is_done that is a number", is_done=1)
heartbeat("a large result", results={"loss": LARGE})
heartbeat("a result that is true", results={"loss": True})
heartbeat("a result that is text", results={"loss": "0.5"})
heartbeat("a long name", results={"x" * 100_000: 1})
heartbeat("a name that moves the cursor", results={"\x1b[2Aloss": 1})
heartbeat("a name with a newline", results={"loss\n": 1})
heartbeat("many results", results={f"r{i}": 1 for i in range(300)})
heartbeat("a large index", ahead_of={str(LARGE): 1})
heartbeat("an index that is no number", ahead_of={"+1": 1})
heartbeat("long versions", software={"gradpost": "1" * 200, "python": "3", "torch": "2"})
bad("plan: a large incarnation", "invalid_message", lambda w: plan_request(w, incarnation=LARGE))
bad(
    "leave: a long reason",
    "invalid_message",
    control(LEAVE.format(rank=0), lambda w: leave_message(w, reason="x" * 2001)),
)
bad("evict: a large rank", "invalid_message", control(EVICT.format(rank=LARGE), {}))
bad("rate: true", "invalid_message", control(RATE, {"rate": True}, method="PUT"))
bad("rate: text", "invalid_message", control(RATE, {"rate": "0.5"}, method="PUT"))
for value in ("0", False, 0.0, LARGE):
    bad(f"rollback: {value!r:.20}", "invalid_message", control(ROLL_BACK, {"round": value}))


for path, more in ((TRAINER_HEARTBEAT, {"round": 1}), (LEAVE, {"outcome": "failed"})):
    at0, at7 = path.format(rank=0), path.format(rank=7)
    bad(f"{at0}: other run", "stale_run", control(at0, lambda w, m=more: identity(w, run="another", **m)))
    bad(f"{at0}: other life", "stale_trainer", control(at0, lambda w, m=more: identity(w, incarnation=99, **m)))
    bad(f"{at7}: nobody", "stale_trainer", control(at7, lambda w, m=more: identity(w, **m)))
    bad(f"{at0}: malformed", "invalid_message", control(at0, {}))
bad("leave: no outcome", "invalid_message", control(LEAVE.format(rank=0), lambda w: identity(w, outcome="gone")))
bad("plan: another run", "stale_run", lambda w: Request(PLAN + "?rank=0&run=another&incarnation=1", "GET", to=None))
bad("plan: no identity", "invalid_message", lambda w: Request(PLAN, "GET", to=None))
bad(
    "plan: too long a wait",
    "invalid_message",
    lambda w: Request(f"{PLAN}?rank=0&run={w.trainer.joined.run}&incarnation=1&wait_seconds=1e9", "GET", to=None),
)
bad("parameter: unknown", "not_found", lambda w: Request(PARAMETERS + "/nobody", "GET", to=None))

# ---------------------------------------------------------------- models

bad("parameters before the run", "not_ready", lambda w: Request(PARAMETERS, "GET", to=None), phase="gathering")


def waiting(w: World) -> Request:
    run = w.trainer.joined
    return Request(f"{PLAN}?rank={run.rank}&run={run.run}&incarnation={run.incarnation}", "GET", to=None)


bad("plan before everybody is here", "not_ready", waiting, phase="gathering")


def declaration(error: str, name: str, phase: str = "gathering", rank: int = 1, **changes: Any) -> None:
    def make(w: World) -> Any:
        return model_message(w.trainers[rank].joined, **changes)

    bad(f"model: {name}", error, control(DECLARE_MODEL.format(rank=rank), make), phase=phase)


FLAGS = [{"nesterov": False, "maximize": False}]
for optimizer in ("LBFGS", "SparseAdam", "Muon", "Adafactor", "ASGD", "Rprop", "Mine", "", "__import__"):
    declaration("unsupported_optimizer", optimizer, optimizer=optimizer, group_flags=[{}])
declaration("unsupported_optimizer", "flags of another optimizer", group_flags=[{"amsgrad": False}])
declaration("unsupported_optimizer", "no flags", group_flags=[{}])
declaration("invalid_message", "flags that are no booleans", group_flags=[{"nesterov": "perhaps", "maximize": False}])
declaration("bad_model", "a name twice", parameters=[["w", [1], "F32", 0], ["w", [1], "F32", 0]])
declaration("bad_model", "no name", parameters=[["", [1], "F32", 0]])
declaration("bad_model", "integers", parameters=[["w", [1], "I64", 0]])
declaration("bad_model", "a group that is not there", parameters=[["w", [1], "F32", 1]])
declaration("bad_model", "a negative size", parameters=[["w", [-1], "F32", 0]])
declaration("bad_model", "more elements than there are", parameters=[["w", [2**62, 2**62], "F32", 0]])
declaration("bad_model", "a buffer called like a block", buffers=[["w.block0", [1], "F32"]])
declaration("invalid_message", "a parameter that is none", parameters=[["w"]])
declaration("invalid_message", "no block size", min_block_size=0)
declaration("invalid_message", "another placement", placement="anywhere")
declaration("model_mismatch", "another shape", parameters=[["w", [3, 101], "F32", 0]])
declaration("model_mismatch", "another optimizer", optimizer="Adagrad", group_flags=[{"maximize": False}])
declaration("model_mismatch", "other flags", group_flags=[{"nesterov": True, "maximize": False}])
declaration("model_mismatch", "another block size", min_block_size=50)
declaration("model_mismatch", "another policy", nonfinite="allow")
declaration("stale_run", "of another run", run="another")
declaration("stale_trainer", "of another life", incarnation=99)
declaration("model_mismatch", "another one than was planned", phase="training", min_block_size=50)

CASES.sort(key=lambda case: case.phase)  # so that few runs are begun
