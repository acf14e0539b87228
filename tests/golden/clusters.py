"""Train the golden runs of a cluster in real processes on real sockets, and compare digests."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any

import httpx
import pytest
from torch.distributed import TCPStore

from tests.cluster.trainer_processes import WORLD, torchrun_environment
from tests.warm.processes import WarmServers
from trainer_client.testing import Child, LocalCluster, processes

from .runs import CHANGES, FAULT_STEP, SETUPS, Setup
from .script import PATIENCE_SECONDS, Turns

FILE = Path(__file__).with_name("digests.json")
FILE_OF_INTEL = FILE.with_name("digests_intel.json")  # of the runs that end with other bits on Intel's CPUs
IS_INTEL = "GenuineIntel" in Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else False
RUN_SECONDS = 200.0  # for all runs of a cluster

Digests = dict[str, dict[str, str]]  # "parameters" or "optimizer_state" -> name of the tensor -> its digest


@contextmanager
def same_arithmetic() -> Iterator[None]:
    """Start processes within the block with arithmetic that rounds alike on all x86-64 CPUs of a vendor.

    Torch's kernels for AVX2 and AVX-512 fuse multiplications with additions, its default kernels do not: without this
    the digests of all nine optimizers depend on the CPU. Torch reads the variable once, so these processes need warm
    servers of their own. MKL computes the dot product in the norm of a gradient, and square roots outside of torch's
    fused kernels: its compatible code begins them with the instruction RSQRTPS, whose result depends on the vendor.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATEN_CPU_CAPABILITY", "default")
        patch.setenv("MKL_CBWR", "COMPATIBLE")
        servers = WarmServers()
        patch.setattr(processes, "start_process", servers.start)
        try:
            yield
        finally:
            servers.close()


class GoldenCluster(LocalCluster):
    """The cluster of a setup, which adds the results that its trainers print to `results`."""

    def __init__(self, name: str, folder: Path, sabotage: str, results: list[dict[str, Any]], **settings: Any) -> None:
        self.setup = SETUPS[name]
        self._results = results
        self._fault_steps = threading.Semaphore(0)
        self._has_joined = threading.Event()
        self._arguments = [str(folder), name]
        self._sabotage = sabotage or ("take_exact_roots" if self.setup.has_exact_roots else "")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the first host's torchrun
        super().__init__(
            pservers=self.setup.pservers,
            trainers=self.setup.trainers,
            on_line=self._read,
            state_dir=folder / "state",
            **({"min_block_size": 100, "topk": 0.05} if self.setup.pservers else {}),
            **self.setup.settings,
            **settings,
        )

    def _read(self, name: str, line: str) -> None:
        if name.startswith("trainer") and line.startswith('{"run"'):
            self._results.append(json.loads(line))
        elif line == "waiting":
            self._fault_steps.release()
        elif "continuing run" in line:
            self._has_joined.set()

    def _spawn_service(self, name: str, module: str, **arguments: Any) -> Child:
        module, environment = self._program(module)
        return super()._spawn_service(name, module, **arguments, **environment)

    def _program(self, module: str) -> tuple[str, dict[str, str]]:
        if not self._sabotage:
            return module, {}
        return "tests.golden.sabotaged", {"GOLDEN_SABOTAGE": self._sabotage, "GOLDEN_PROGRAM": module}

    def start_trainers(self, runs: Collection[str], ranks: Collection[int] = ()) -> None:
        """Start all trainers, or these."""
        module, environment = self._program("tests.golden.script")
        command = [sys.executable, "-m", module, *self._arguments, *runs]
        for rank in ranks or range(WORLD if self.setup.are_hosts else self.setup.trainers):
            own = torchrun_environment(rank, self._store.port) if self.setup.are_hosts else {}
            self.start_trainer(rank, command, {**environment, **own})

    def wait_for_fault_step(self, num_trainers: int = 1) -> None:
        """Wait until so many trainers wait for their turn."""
        for _ in range(num_trainers):
            assert self._fault_steps.acquire(timeout=PATIENCE_SECONDS), self._last_lines()

    def ask(self, method: str, path: str, message: Any = None) -> dict[str, Any]:
        answer = httpx.request(method, f"{self.address}/v1/{path}", json=message, timeout=PATIENCE_SECONDS)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def roll_back(self, turns: Turns) -> None:
        """Set the learning rate, and go back to that round two rounds later."""
        assert self.ask("PUT", "controls/rate", {"rate": 0.02})["round"] == FAULT_STEP + 1
        assert self.ask("POST", "checkpoints")["round"] == FAULT_STEP
        turns.pass_to(*range(self.setup.trainers))
        self.wait_for_fault_step(self.setup.trainers)
        assert self.ask("POST", "rollback", {"round": FAULT_STEP})["round"] == FAULT_STEP + 1
        turns.pass_to(*range(self.setup.trainers))

    def change_members(self, turns: Turns, run: str) -> None:
        """Evict the last trainer, and let another process take its place two rounds later."""
        *others, last = range(self.setup.trainers)
        self.ask("POST", f"trainers/{last}/evict")
        turns.pass_to(last)
        assert self.trainers[last].wait(PATIENCE_SECONDS) != 0
        turns.pass_to(*others)
        self.wait_for_fault_step(len(others))
        self.start_trainers([run], [last])
        assert self._has_joined.wait(PATIENCE_SECONDS), self._last_lines()
        turns.pass_to(*others)  # the open round, which is the last one without the new process

    def wait_for_trainers(self) -> None:
        codes = [trainer.wait(RUN_SECONDS) for trainer in self.trainers]
        assert not any(codes), self._last_lines()

    def _last_lines(self) -> str:
        return "\n".join([*self.output][-100:])


def train(name: str, folder: Path, runs: Collection[str] = (), sabotage: str = "") -> dict[str, Digests]:
    """Train the golden runs of a cluster, or some of them, in an empty folder; returns the digests of each."""
    setup = SETUPS[name]
    runs = runs or list(setup.runs)
    *_, last = runs
    loses_disks = setup.runs[last].fault == "lose the disks and resume"
    is_resumed = loses_disks or setup.runs[last].fault == "stop and resume"
    for rank in range(setup.trainers):
        os.mkfifo(folder / f"turn-{rank}")
    turns = Turns(folder, setup.trainers)
    results: list[dict[str, Any]] = []
    with GoldenCluster(name, folder, sabotage, results) as cluster:
        cluster.start_trainers(runs)
        for run in runs:
            fault = setup.runs[run].fault
            if fault in CHANGES:
                cluster.wait_for_fault_step(setup.trainers)
            if fault == "set a rate and roll back":
                cluster.roll_back(turns)
            elif fault == "evict a trainer and let it join":
                cluster.change_members(turns, run)
            elif fault == "kill a trainer between two pservers":
                cluster.wait_for_fault_step()
                turns.pass_to(0, 0)  # and the process that takes its place
                assert cluster.trainers[0].wait(PATIENCE_SECONDS) != 0
                cluster.start_trainers([run], [0])
            elif fault == "kill a pserver":
                cluster.wait_for_fault_step()
                cluster.pservers[1].signal(SIGKILL)
                cluster.pservers[1].wait(PATIENCE_SECONDS)
                cluster.start_pserver(1)
                turns.pass_to(0)
        if is_resumed:
            cluster.wait_for_fault_step()
            assert not loses_disks or cluster.ask("POST", "checkpoints")["round"] == FAULT_STEP
        else:
            cluster.wait_for_trainers()
    for index in range(setup.pservers) if loses_disks else ():
        shutil.rmtree(folder / "state" / f"pserver-{index}")
    if is_resumed:
        with GoldenCluster(name, folder, sabotage, results, resume=True) as cluster:
            cluster.start_trainers([last])
            turns.pass_to(0)
            cluster.wait_for_trainers()
        assert {result["start"] for result in results if result["run"] == last} == {FAULT_STEP}
    return {run: _find_digests(setup, run, results) for run in runs}


def _find_digests(setup: Setup, run: str, results: list[dict[str, Any]]) -> Digests:
    """Return the digests of trainer 0; in the synchronous mode all trainers must end with its parameters.

    The parameters of trainers with fewer steps are digests of their own.
    """
    by_rank = {result["rank"]: result for result in results if result["run"] == run}
    found: Digests = {half: by_rank[0][half] for half in ("parameters", "optimizer_state")}
    if setup.runs[run].steps:
        found |= {f"parameters of trainer {rank}": by_rank[rank]["parameters"] for rank in sorted(by_rank)[1:]}
    elif "mode" not in setup.settings:
        different = [rank for rank in by_rank if by_rank[rank]["parameters"] != by_rank[0]["parameters"]]
        assert not different, f"{run}: trainers {different} ended with other parameters than trainer 0"
    return found


def read_recorded() -> dict[str, dict[str, Digests]]:
    """Return the recorded digests by cluster and run, those of this CPU's vendor."""
    recorded: dict[str, dict[str, Digests]] = json.loads(FILE.read_text())
    if IS_INTEL:
        for name, runs in json.loads(FILE_OF_INTEL.read_text()).items():
            recorded[name] |= runs
    return recorded


def write_recorded(recorded: dict[str, dict[str, Digests]]) -> None:
    """Record the digests of all runs: on Intel's CPUs only those that differ from the others'."""
    target = FILE
    if IS_INTEL:
        target, usual = FILE_OF_INTEL, json.loads(FILE.read_text())
        recorded = {
            name: {run: digests for run, digests in runs.items() if digests != usual.get(name, {}).get(run)}
            for name, runs in recorded.items()
        }
    target.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def differences(run: str, found: Digests, recorded: Digests) -> list[str]:
    """Return a line for each half of a run that differs, with the names of its tensors."""
    lines = []
    for half, digests in found.items():
        before = recorded.get(half, {})
        names = sorted(name for name in digests.keys() | before.keys() if digests.get(name) != before.get(name))
        if names:
            lines.append(f"{run}: {half} differ in {', '.join(names)}")
    return lines
