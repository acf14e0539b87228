"""Trainers as real processes that start at once: forked from a server process which has imported torch already.

Importing this module warms that process up. Each trainer reports what happens to it through a pipe, with the time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from ps_protocol.errors import GradpostError
from trainer_client import RemoteOptimizer, Session, connect
from trainer_client.optimizer.wrapped_optimizer import describe_optimizer
from trainer_client.testing import LocalCluster
from trainer_client.testing.processes import Child

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first one imports for seconds
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload([__name__])

FOREVER = 1_000_000_000


@dataclass(frozen=True)
class Plot:
    """The steps of a trainer, after which it may hang with living heartbeats until `wake`."""

    steps: int = FOREVER
    hangs_after: int | None = None  # this step; 0: after it declared its model, before it uploads any value
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """`what` is "round", "hanging", "done" or the class of the exception that ended the trainer."""

    what: str
    at: float  # by the monotonic clock, which all processes share
    round: int = 0
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """A trainer process and the events that it has reported."""

    def __init__(self, address: str, rank: int, plot: Plot) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self._pipe, theirs = forkserver.Pipe()
        self._process = forkserver.Process(target=_play, args=(theirs, address, rank, plot), daemon=True)
        self._process.start()
        theirs.close()

    def wait_for(self, what: str, round_: int = 0, *, timeout: float = 30) -> Event:
        """Wait for this event; fails if the trainer ends with anything else."""
        deadline = time.monotonic() + timeout
        while True:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"trainer {self.rank} did not report {what!r}, but {self.events[-3:]}")
            event = self._pipe.recv()
            self.events.append(event)
            if event.what == what and event.round >= round_:
                return event
            assert event.what in ("round", "hanging"), f"trainer {self.rank}: {event}"

    def wait_for_end(self, timeout: float = 30) -> Event:
        """Wait for its last event: "done" or an exception."""
        deadline = time.monotonic() + timeout
        while self._pipe.poll(max(0.0, deadline - time.monotonic())):
            event = self._pipe.recv()
            self.events.append(event)
            if event.what not in ("round", "hanging"):
                return event
        raise AssertionError(f"trainer {self.rank} waits for ever; its last events are {self.events[-3:]}")

    def drain(self) -> int:
        """Return the newest round that it has reported; fails if it has ended."""
        while self._pipe.poll():
            self.events.append(self._pipe.recv())
        assert self.events[-1].what == "round", f"trainer {self.rank}: {self.events[-1]}"
        return self.events[-1].round

    def wake(self) -> None:
        """Let a trainer that hangs go on."""
        self._pipe.send("wake")

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; returns when that was."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        return time.monotonic()

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _play(pipe: Connection, address: str, rank: int, plot: Plot) -> None:
    torch.set_num_threads(1)

    def report(what: str, round_: int = 0, text: str = "", facts: Any = None) -> None:
        pipe.send(Event(what, time.monotonic(), round_, text, facts or {}))

    def hang(round_: int) -> None:
        report("hanging", round_)
        pipe.recv()

    try:
        with connect(address, rank=rank, **plot.settings) as session:
            model = nn.Linear(4, 2)
            local = torch.optim.SGD(model.named_parameters(), lr=0.1)
            if plot.hangs_after == 0:
                _declare(session, local)
                hang(0)
            optimizer = RemoteOptimizer(local, session=session)
            report("round", 0)
            while optimizer.round < plot.steps:
                time.sleep(0.01)  # to compute; and the pipe must not run full between two looks at it
                optimizer.zero_grad()
                loss = model(torch.ones(3, 4)).sum()
                loss.backward()
                session.report(loss=loss.item())
                optimizer.step()
                report("round", optimizer.round)
                if optimizer.round == plot.hangs_after:
                    hang(optimizer.round)
        report("done", optimizer.round)
    except GradpostError as error:
        report(error.code, text=str(error), facts=error.facts)
    except BaseException as error:
        report(type(error).__name__, text=str(error))


def _declare(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Do the first half of making a RemoteOptimizer."""
    from ps_protocol.vocabulary import ParameterSpec

    parameters = [ParameterSpec("weight", (2, 4)), ParameterSpec("bias", (2,))]
    session.io.run(session.client.declare(parameters, describe_optimizer(optimizer)))


NUM_HOSTS = 2
PROCESSES = 2  # of each
WORLD = NUM_HOSTS * PROCESSES
ROOT = str(Path(__file__).parents[2])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def torchrun(host: int, port: int, *options: str) -> list[str]:
    """Return the command of `torchrun`. The first host has the store of all, on this port."""
    of_all = [f"--nnodes={NUM_HOSTS}", f"--nproc-per-node={PROCESSES}", "--no-python"]
    where = [f"--node-rank={host}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *of_all, *where, *options]


def start_hosts(cluster: LocalCluster, command: list[str], **more: str) -> list[Child]:
    port = free_port()
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, **more}
    return [cluster.start_trainer(host, [*torchrun(host, port), *command], env) for host in range(NUM_HOSTS)]


def torchrun_environment(rank: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for one process; the first host's agent has a store on this port."""
    host, process = divmod(rank, PROCESSES)
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_RANK": str(process),
        "LOCAL_WORLD_SIZE": str(PROCESSES),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(NUM_HOSTS),
    }


def fork_hosts(work: Callable[..., None], of_all: Mapping[str, str], *arguments: object) -> list[int | None]:
    """Call `work(environment, *arguments)` in processes that have imported torch already; returns their exit codes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the first host's agent
    processes = []
    for rank in range(WORLD):
        environment = {**of_all, **torchrun_environment(rank, store.port)}
        processes.append(forkserver.Process(target=work, args=(environment, *arguments), daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(40)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]
