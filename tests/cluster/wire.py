"""Trainers made of plain HTTP requests, so that tests can send what no honest client would."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from ps_protocol.fence import Fence
from ps_protocol.frames import DTYPE_BYTES, encode_header
from ps_protocol.messages import DeclareModel, PlanReady, TrainerJoined
from ps_protocol.optimizers import RULES
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import BARRIER_HEADER, HYPER_PARAMETERS_KEY, NUM_BLOCKS_KEY, WAIT_HEADER
from ps_protocol.routes import (
    BARRIER,
    DECLARE_MODEL,
    GET,
    INITIAL,
    JOIN_TRAINER,
    LEAVE,
    PLAN,
    SEND,
    STATE,
    STATUS,
)
from ps_protocol.vocabulary import PROTOCOL_VERSION, Block
from trainer_client.testing import LocalCluster

PARAMETERS: tuple[tuple[str, tuple[int, ...], str, int], ...] = (
    ("w", (3, 100), "F32", 0),
    ("b", (10,), "F32", 0),
    ("h", (16,), "BF16", 0),
)
NUMBERS = [{"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}]


def join_message(instance: str, rank: int | None, **changes: Any) -> dict[str, Any]:
    return {"protocol": PROTOCOL_VERSION, "instance": f"instance {instance}", "rank": rank, **changes}


def model_message(joined: TrainerJoined, **changes: Any) -> dict[str, Any]:
    """Declare SGD on a few parameters."""
    return {
        "run": joined.run,
        "incarnation": joined.incarnation,
        "parameters": PARAMETERS,
        "optimizer": "SGD",
        "group_flags": [dict.fromkeys(RULES["SGD"].flags, False)],
        **changes,
    }


def encode_blocks(
    plan: SlicePlan, blocks: tuple[Block, ...], metadata: Mapping[str, str] | None = None, value: float = 1.0
) -> bytes:
    """Encode a frame of these blocks; every element has the same value, which bfloat16 can hold."""
    tensors = [(b.name, plan.parameter[b.parameter].dtype, (b.num_elements,)) for b in blocks]
    element = struct.pack("<f", value)
    data = b"".join(element[-DTYPE_BYTES[dtype] :] * shape[0] for _, dtype, shape in tensors)  # bfloat16: upper half
    return encode_header(tensors, metadata) + data


def completion(num_blocks: int, numbers: Any = NUMBERS) -> dict[str, str]:
    """Return the metadata of a contribution's last push."""
    return {NUM_BLOCKS_KEY: str(num_blocks), HYPER_PARAMETERS_KEY: json.dumps(numbers)}


class WireTrainer:
    """One trainer; every method is one request, or one for each pserver. Raises httpx.HTTPStatusError."""

    def __init__(self, http: httpx.AsyncClient, coordinator: str) -> None:
        self.http = http
        self.coordinator = coordinator
        self.joined: TrainerJoined
        self.ready: PlanReady
        self.plan: SlicePlan

    async def join(self, instance: str, rank: int) -> None:
        while True:
            response = await self.http.post(self.coordinator + JOIN_TRAINER, json=join_message(instance, rank))
            if response.status_code != 503:  # the last checkpoint of the run before is being written
                break
            await asyncio.sleep(0.1)
        self.joined = TrainerJoined.model_validate_json(response.raise_for_status().content)

    async def declare(self, **changes: Any) -> None:
        message = DeclareModel(**model_message(self.joined, **changes))
        path = DECLARE_MODEL.format(rank=self.joined.rank)
        await self._post(self.coordinator + path, json=message.model_dump(mode="json"))

    async def wait_for_plan(self) -> None:
        identity = {"rank": self.joined.rank, "run": self.joined.run, "incarnation": self.joined.incarnation}
        while True:
            response = await self.http.get(self.coordinator + PLAN, params={**identity, "wait_seconds": 20})
            if response.status_code != 503:
                break
        self.ready = PlanReady.model_validate_json(response.raise_for_status().content)
        self.plan = self.ready.plan

    async def leave(self, outcome: str = "done") -> None:
        message = {"run": self.joined.run, "incarnation": self.joined.incarnation, "outcome": outcome}
        await self._post(self.coordinator + LEAVE.format(rank=self.joined.rank), json=message)

    def fence(self, round_: int, pserver: int = 0, **changes: Any) -> dict[str, str]:
        info = self.ready.pservers[pserver]
        fence = Fence(
            **{
                "protocol": PROTOCOL_VERSION,
                "run": self.ready.run,
                "attempt": self.ready.attempt,
                "plan": self.plan.digest,
                "pserver": info.index,
                "pserver_incarnation": info.incarnation,
                "rank": self.joined.rank,
                "trainer_incarnation": self.joined.incarnation,
                "round": round_,
                **changes,
            }
        )
        return fence.to_headers()

    async def upload_initial(self) -> None:
        for info, shard in zip(self.ready.pservers, self.plan.shards, strict=True):
            body = encode_blocks(self.plan, shard, value=0.0)
            await self._post(info.address + INITIAL, headers=self.fence(0, info.index), content=body)

    async def push(self, round_: int, *values: float) -> None:
        """Push the whole contribution to every pserver; `values` are the elements for each, 1 by default."""
        for info, shard in zip(self.ready.pservers, self.plan.shards, strict=True):
            value = values[info.index] if values else 1.0
            body = encode_blocks(self.plan, shard, completion(len(shard)), value)
            await self._post(info.address + SEND, headers=self.fence(round_, info.index), content=body)

    async def barrier(self, round_: int, kind: str = "batch") -> None:
        for info in self.ready.pservers:
            headers = {**self.fence(round_, info.index), BARRIER_HEADER: kind}
            await self._post(info.address + BARRIER, headers=headers)

    async def get(self, round_: int) -> list[bytes]:
        """Get the shard of every pserver."""
        bodies = []
        for info in self.ready.pservers:
            headers = {**self.fence(round_, info.index), WAIT_HEADER: "20"}
            bodies.append((await self._post(info.address + GET, headers=headers)).content)
        return bodies

    async def _post(self, url: str, **arguments: Any) -> httpx.Response:
        return (await self.http.post(url, **arguments)).raise_for_status()


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
                self.addresses = [p.address for p in self.cluster.status().pservers if p.heartbeat.software is not None]
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
        """Return everything that a bad request could have changed."""
        status = (await self.http.get(self.cluster.address + STATUS)).json()
        for member in (*status["pservers"], *status["trainers"]):
            del member["heartbeat_age_seconds"], member["heartbeat"]["process"]
        for pserver in status["pservers"]:
            del pserver["heartbeat"]  # it may be a second old, unlike the state
        del status["at"], status["round"], status["process"], status["elapsed_seconds"]
        del status["standbys"]  # a standby reports itself, at any time
        states = []
        for address in self.addresses:
            state = (await self.http.get(address + STATE, params={"digest": True})).json()
            assert self.phase == "gathering" or state["digest"]
            del state["transports"], state["waiting_seconds"], state["process"]
            del state["coming_checkpoints"], state["published"]  # which the coordinator names at any time
            states.append(state)
        return status, states

    @property
    def trainer(self) -> WireTrainer:
        return self.trainers[0]

    def own_blocks(self) -> Any:
        """Return the blocks of pserver 0."""
        return self.trainer.plan.shards[0]
