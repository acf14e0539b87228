"""A real pserver under attack, and an honest client that pulls parameters meanwhile."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ps_http2.polled_client import PolledTransport
from ps_protocol.routes import GET, HEALTH, SEND, SHARD, STATE
from tests.cluster.wire import WireTrainer
from trainer_client.testing import LocalCluster

from .target import Outcome, Target

ROOT = Path(__file__).parents[2]
PARAMETERS = [("large", (4_000_000,), "F32", 0), ("small", (1000,), "F32", 0)]
REQUESTS_PER_SECOND = 100
MIB = 1024 * 1024


@dataclass(frozen=True)
class Verdict:
    """The effect of one attack, in seconds and bytes."""

    attack: str
    p99_before: float
    p99_during: float
    num_failed: int  # of the honest client's requests
    grown_bytes: int  # of the pserver's memory at its peak
    kept_bytes: int  # of it, a second after the attack
    outcome: str
    state_is_unchanged: bool


class Arena:
    """One cluster with a run at version 0, and one honest client."""

    def __init__(
        self, cluster: LocalCluster, trainer: WireTrainer, http: httpx.AsyncClient, honest: httpx.Client
    ) -> None:
        self.cluster = cluster
        self._trainer = trainer
        self._http = http
        self._honest = honest
        address = trainer.ready.pservers[0].address
        self.target = Target(address, cluster.address, HEALTH, f"{SHARD}?name=large.block0", SEND, {**trainer.fence(1)})

    async def judge(self, attack: str, seconds: float, calm_seconds: float | None = None) -> Verdict:
        """Measure before the attack, for `calm_seconds` or as long as it takes, and during it."""
        digest = await self._digest()
        before, _ = await self._measure(seconds if calm_seconds is None else calm_seconds)
        self._forget_peak()
        memory = self._memory("VmRSS")
        attacker = await create_subprocess_exec(
            sys.executable, "-m", "benchmarks.attacks.attacker", attack, str(seconds), self.target.to_json(),
            cwd=ROOT, stdout=PIPE,
        )  # fmt: skip
        await asyncio.sleep(0.5)  # it is being imported
        during, num_failed = await self._measure(seconds)
        printed, _ = await asyncio.wait_for(attacker.communicate(), seconds + 60)
        if not self.cluster.pservers[0].is_running:
            tail = "\n".join([*self.cluster.output][-50:])
            raise RuntimeError(f"{attack} ended {self.cluster.pservers[0]}; the attacker printed {printed!r}:\n{tail}")
        grown = self._memory("VmHWM") - memory
        await asyncio.sleep(1)
        outcome = Outcome.from_json(json.loads(printed))
        return Verdict(
            attack, _p99(before), _p99(during), num_failed, grown, self._memory("VmRSS") - memory,
            outcome.describe(), await self._digest() == digest,
        )  # fmt: skip

    async def _measure(self, seconds: float) -> tuple[list[float], int]:
        """Return the latencies of a steady stream of pulls, and the number of failed ones."""
        latencies, num_failed = [], 0
        begin = time.perf_counter()
        for number in range(int(seconds * REQUESTS_PER_SECOND)):
            await asyncio.sleep(max(0.0, begin + number / REQUESTS_PER_SECOND - time.perf_counter()))
            asked = time.perf_counter()
            if asked > begin + 2 * seconds:
                break
            try:
                response = await asyncio.to_thread(
                    self._honest.post, self.target.address + GET, headers=self._trainer.fence(0), json=["small.block0"]
                )
                num_failed += response.status_code != 200
            except httpx.TransportError:
                num_failed += 1
            latencies.append(time.perf_counter() - asked)
        return latencies, num_failed

    async def _digest(self) -> str:
        state = (await self._http.get(self.target.address + STATE, params={"digest": True})).json()
        return str(state["digest"])

    @property
    def _process(self) -> Path:
        return Path("/proc") / str(self.cluster.pservers[0].pid)

    def _memory(self, name: str) -> int:
        [line] = [line for line in (self._process / "status").read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024

    def _forget_peak(self) -> None:
        (self._process / "clear_refs").write_text("5")


def _p99(latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=100)[98]


@asynccontextmanager
async def open_arena(**settings: object) -> AsyncIterator[Arena]:
    """Yield a cluster of one pserver that closes slow connections after two seconds, so that short attacks suffice."""
    defaults = {
        "header_timeout_seconds": 2,
        "body_timeout_seconds": 2,
        "lease_seconds": 3600,
        "max_inflight_bytes": 64 * MIB,
        "min_block_size": 10_000_000,
    }
    cluster = LocalCluster(pservers=1, trainers=1, **{**defaults, **settings})
    with cluster:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            trainer = WireTrainer(http, cluster.address)
            await trainer.join("a", 0)
            await trainer.declare(parameters=PARAMETERS)
            await trainer.wait_for_plan()
            await trainer.upload_initial()
            await trainer.get(0)
            with httpx.Client(transport=PolledTransport(), timeout=10) as honest:
                yield Arena(cluster, trainer, http, honest)
