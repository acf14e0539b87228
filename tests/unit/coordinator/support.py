"""Messages and members with defaults for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ps_protocol.consistency import Consistency
from ps_protocol.fields import ScriptInfo
from ps_protocol.membership import RegisterPserver
from ps_protocol.messages import (
    DeclareModel,
    JoinTrainer,
    Leave,
    PserverHeartbeat,
    ShardFile,
    TrainerHeartbeat,
    TrainerJoined,
)
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.coordinator.history import CurveList, HistoryRecord
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state.cluster import Cluster
from services.coordinator.state.run import Run
from services.coordinator.state.status import describe_status
from services.runtime.checkpoints import shard_name

LEASE = 10.0
SGD_FLAGS = {"nesterov": False, "maximize": False}


def defaults(num_trainers: int = 2, *, consistency: Consistency | None = None, **changes: Any) -> CoordinatorSettings:
    values: dict[str, Any] = {
        **asdict(consistency or Consistency()),
        "num_trainers": num_trainers,
        "round_timeout_seconds": 60.0,
        "on_trainer_loss": "fail",
        "durability": "none",
    }
    return CoordinatorSettings(**{**values, **changes})


def make_run(num_trainers: int = 2) -> Run:
    return Run.begin("run1", defaults(num_trainers), {})


def make_cluster(
    num_trainers: int = 2, num_pservers: int = 2, *, exit_when_done: bool = False, **changes: Any
) -> Cluster:
    names = (f"run{i}" for i in range(1, 100))
    settings = defaults(num_trainers, lease_seconds=LEASE, exit_when_done=exit_when_done, **changes)
    if num_pservers:
        settings = settings.model_copy(update={"num_pservers": num_pservers})
    return Cluster(settings, lambda: next(names))


def registration(instance: str = "a", **changes: Any) -> RegisterPserver:
    values = {"protocol": PROTOCOL_VERSION, "instance": f"pserver {instance}", "address": f"http://{instance}:1/"}
    return RegisterPserver(**{**values, "http2": True, **changes})


def joining(instance: str = "a", rank: int | None = None, **changes: Any) -> JoinTrainer:
    values = {"protocol": PROTOCOL_VERSION, "instance": f"trainer {instance}", "rank": rank}
    return JoinTrainer(**{**values, **changes})


def model(incarnation: int = 1, run: str = "run1", **changes: Any) -> DeclareModel:
    values: dict[str, Any] = {
        "run": run,
        "incarnation": incarnation,
        "parameters": (("w", (10, 1000), "F32", 0), ("b", (10,), "F32", 0)),
        "optimizer": "SGD",
        "group_flags": (SGD_FLAGS,),
    }
    return DeclareModel(**{**values, **changes})


def alive(incarnation: int = 1, run: str = "run1", round_: int = 0, **results: float) -> TrainerHeartbeat:
    return TrainerHeartbeat(run=run, incarnation=incarnation, round=round_, results=results)


def beat(incarnation: int = 1, run: str | None = None, round_: int = 0, **changes: Any) -> PserverHeartbeat:
    return PserverHeartbeat(incarnation=incarnation, run=run, round=round_, **changes)


def shard_file(pserver: int, round_: int, attempt: int = 0) -> ShardFile:
    return ShardFile(
        pserver=pserver, name=shard_name(pserver, 2, attempt, 1), num_bytes=1, digest="0" * 32, round=round_,
        attempt=attempt, torch="2", cpu="AVX2",
    )  # fmt: skip


def leaving(outcome: Any = "done", incarnation: int = 1, run: str = "run1", **changes: Any) -> Leave:
    return Leave(run=run, incarnation=incarnation, outcome=outcome, **changes)


def join_all(cluster: Cluster, now: float = 0.0, suffix: str = "") -> list[TrainerJoined]:
    """Let all trainers join and declare."""
    joined = [
        cluster.join_trainer(joining(f"{suffix}{i}", rank=i), now) for i in range(cluster.run.settings.num_trainers)
    ]
    for answer in joined:
        cluster.declare_model(answer.rank, model(answer.incarnation, answer.run), now)
    return joined


def change_record(cluster: Cluster, **fields: Any) -> None:
    cluster.run = replace(cluster.run, record=cluster.run.record.with_fields(**fields))


def list_checkpoints(cluster: Cluster, rounds: Sequence[int]) -> None:
    change_record(cluster, checkpoints=tuple(rounds))


def train(cluster: Cluster, now: float = 0.0) -> None:
    """Let all members join and train; every pserver has sent a heartbeat."""
    for index in range(cluster.registry.num_pservers):
        cluster.register_pserver(registration(str(index), index=index), now)
    join_all(cluster, now)
    cluster.start_run_if_complete(now)
    assert cluster.run.record.plan is not None
    cluster.run = cluster.run.begin_training(now)
    cluster.run = cluster.run.finish_change(cluster.run.record.change_number)
    for index in range(cluster.registry.num_pservers):
        cluster.pserver_heartbeat(index, beat(run=cluster.run.record.name), now)


def make_history_record(
    run: str = "run1",
    started_at: float = 1000.0,
    losses: Sequence[float] = (2.0, 1.0),
    name: str | None = None,
    result: str = "loss",
    **status: Any,
) -> HistoryRecord:
    """Return the record of a run of two trainers, each of which reported these losses in every tenth round.

    At the end they had this `result`.
    """
    cluster = make_cluster()
    train(cluster)
    described = describe_status(cluster.run, cluster.registry, 0.0, 0.0)
    results = {result: losses[-1]}
    script = ScriptInfo(command="train.py --lr 0.1", run_name=name, optimizer="SGD(lr=0.1)")
    heartbeat = alive(run=run).model_copy(update={"results": results, "script": script})
    ended = {"state": "done", "heartbeat": heartbeat}
    trainers = tuple(trainer.model_copy(update=ended) for trainer in described.trainers)
    changed = {"run": run, "state": "finished", "round": 10 * len(losses), "trainers": trainers, **status}
    rounds = [10 * (i + 1) for i in range(len(losses))]
    times = [started_at + i + 1 for i in range(len(losses))]
    curve = {"round": rounds, "at": times, "value": list(losses), "count": [10] * len(losses)}
    return HistoryRecord(
        status=described.model_copy(update=changed),
        started_at=started_at,
        ended_at=started_at + len(losses) + 1,
        summary=None,
        curves=CurveList(run=run, curves={"loss": {0: curve, 1: curve}}),
    )
