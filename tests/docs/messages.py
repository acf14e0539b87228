"""An example of every message, which docs/protocol-reference.md shows as JSON; some contain others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ps_protocol.consistency import Consistency
from ps_protocol.errors import TrainerLost
from ps_protocol.fields import Message, ProcessFigures, ScriptInfo, Software
from ps_protocol.membership import (
    Controls,
    Freeze,
    FrozenRounds,
    HeldRun,
    InstallMembers,
    InstallRun,
    Membership,
    PserverRegistered,
    RegisterPserver,
    WantCheckpoint,
)
from ps_protocol.messages import (
    CheckpointCreated,
    DeclareModel,
    JoinTrainer,
    Leave,
    PlanReady,
    PserverHeartbeat,
    PserverHeartbeatReply,
    PserverInfo,
    ShardFile,
    TrainerHeartbeat,
    TrainerHeartbeatReply,
    TrainerJoined,
)
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import BarrierAnswer, NormAnswer, PushAnswer
from ps_protocol.standbys import (
    FenceStandby,
    PserverEnded,
    ReportStandby,
    SeenStandbys,
    ServedRun,
    ShardDigests,
    StandbyAnswer,
)

from .markdown import example_plan, read

PLAN = example_plan(read("protocol.md"))
DIGEST = SlicePlan.from_json(PLAN).digest
RUN = "5f0c9e7d21ab"
INSTANCE = "9f3c5e2a7b1d4c60"
ADDRESS = "http://10.0.0.7:7071"
SOCKET = "gradpost-1f0b3c5d7e9a2b4c6d8e0f1a3b5c7d9e"
VERSIONS = Software(gradpost="0.1.0", python="3.11.7", torch="2.13.0")
SCRIPT = ScriptInfo(command="train.py --epochs 3", run_name="nightly", optimizer="SGD(lr=0.1)", total_rounds=100)
PSERVER = PserverInfo(index=0, address=ADDRESS, incarnation=2, http2=True, local=SOCKET)
ROUNDS = FrozenRounds(
    applied=41, participants={41: (0, 1)}, complete={42: (0, 1)}, counted={42: (0,)}, verdicts={42: (1,)}
)
MEMBERSHIP = Membership(
    {0: 1, 1: 3}, {1: 43}, {42: (0,)}, {42: (0,)}, (Controls(since=40, rates={0: 0.01}, frozen=("s",)),)
)
FIGURES = ProcessFigures(
    host="worker-3", cpu_seconds=42.5, resident_bytes=412655616, read_bytes=0,
    written_bytes=1843200, sent_bytes=52428800, received_bytes=52428800,
)  # fmt: skip
LOST = TrainerLost("trainer 1 was silent for 10 s", ranks=[1]).to_problem()

EXAMPLES: tuple[Any, ...] = (
    JoinTrainer(
        protocol=2, instance=INSTANCE, rank=0, world_size=2, expects={"mode": "sync"}, metrics_address="http://10.0.0.9:9000"
    ),
    TrainerJoined(
        run=RUN, rank=0, world_size=2, incarnation=1, consistency=Consistency(), lease_seconds=10,
        round_timeout_seconds=300,
    ),
    DeclareModel(
        run=RUN, incarnation=1, parameters=(("w", (2, 2), "F32", 0), ("s", (), "BF16", 0)),
        buffers=(("mask", (2,), "BOOL"),), optimizer="SGD", group_flags=({"nesterov": False, "maximize": False},),
        aliases={"head.w": "w"},
    ),
    PlanReady(run=RUN, attempt=0, plan=PLAN, digest=DIGEST, pservers=(PSERVER,), uploader=0),
    TrainerHeartbeat(
        run=RUN, incarnation=1, round=41, results={"loss": 0.31}, software=VERSIONS,
        unreachable={0: (1, 2.5)}, process=FIGURES,
        ahead_of={0: 2}, script=SCRIPT,
    ),
    TrainerHeartbeatReply(state="failed", failure=LOST, attempt=1, resume=40, pservers=(PSERVER,)),
    Leave(run=RUN, incarnation=1, outcome="done", round=100, attempt=0),
    PushAnswer(status="staged", staged=2, complete=True),
    BarrierAnswer(round=42, missing=(1,), notice="trainer 1 is lost; the run fails in 25 s"),
    NormAnswer(contributions="8d0f6c1f2a3b4c5d", sum_of_squares=5.5),
    RegisterPserver(
        protocol=2, instance=INSTANCE, address=ADDRESS, http2=True, local=SOCKET, index=0, previous=1,
        held=HeldRun(run=RUN, attempt=0, plan=DIGEST, rounds=ROUNDS),
    ),
    PserverRegistered(index=0, incarnation=2, lease_seconds=10),
    PserverHeartbeat(
        round=41, missing=(1,), waiting_seconds=0.2, incarnation=2, run=RUN,
        published=ShardFile(
            pserver=0, name="pserver-0-of-1.0-2.safetensors", num_bytes=4096,
            digest="6f1d0a9be3c5472881a4f2b7c0d9e356", round=30, attempt=0, torch="2.13.0", cpu="AVX2",
        ),
        coming_checkpoints=(60,),
        standbys=SeenStandbys(number=3, connected=(INSTANCE,), caught_up=(INSTANCE,)),
        batch_barriers=(0,), participants=(0, 1), num_blocks=2, shard_bytes=18, pushed_bytes=22468, pulled_bytes=22468,
        num_applies=41, apply_seconds=0.02, num_waits=41, wait_seconds=1.6,
        software=VERSIONS,
        process=FIGURES,
    ),
    PserverHeartbeatReply(complete=(0, 30)),
    InstallRun(
        run=RUN, attempt=1, plan=PLAN, incarnation=2, membership=MEMBERSHIP, consistency=Consistency(),
        nonfinite="reject", patience_seconds=340, durability="log", checkpoint_rounds=30, restore=41,
        began={0: None, 1: 41}, uploader=0, number=7,
    ),
    Freeze(run=RUN, attempt=1, number=8),
    ROUNDS,
    InstallMembers(run=RUN, attempt=1, number=8, membership=MEMBERSHIP),
    WantCheckpoint(run=RUN, round=60),
    CheckpointCreated(run=RUN, round=60, place="file:///var/lib/gradpost/checkpoints"),
    ReportStandby(
        protocol=2, instance=INSTANCE, address="http://10.0.0.6:7071", follows=0, run=RUN, attempt=1, round=57,
        lag_rounds=1, lag_bytes=40_410, lag_seconds=0.02,
    ),
    PserverEnded(address=ADDRESS),
    StandbyAnswer(lease_seconds=10, leader="http://10.0.0.5:7071", incarnation=2, run=RUN, attempt=1, round=58),
    ServedRun(
        installed=InstallRun(
            run=RUN, attempt=1, plan=PLAN, incarnation=2, membership=MEMBERSHIP, consistency=Consistency(),
            nonfinite="reject", patience_seconds=340, durability="log", uploader=0, number=8,
        ),
        torch="2.11.0+cpu", cpu="AVX2",
    ),
    ShardDigests(round=58, digests={"w.block0": "1f0e6a7c9d3b2a54", "buffer mask": "99aa06d3014798d8"}),
    FenceStandby(run=RUN, attempt=1, incarnation=2),
)  # fmt: skip


def messages_in(value: object) -> Iterator[Any]:
    """Yield the messages that a value contains, itself included."""
    if isinstance(value, Message):
        yield value
        members = [getattr(value, name) for name in type(value).model_fields]
    elif is_dataclass(value):
        yield value
        members = [getattr(value, field.name) for field in fields(value)]
    else:
        members = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else []
    for member in members:
        yield from messages_in(member)
