"""A trainer's session: a place in a run for the life of a script, reached by blocking calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Literal, Unpack

from ps_config.environment import CallError
from ps_protocol.errors import GradpostError
from ps_protocol.fields import MAX_RESULTS, OWN_RESULTS, check_result_name
from ps_protocol.messages import RunSummary
from ps_protocol.vocabulary import Mode, Rank, Round, Strategy

from ..client.arguments import TrainerArguments
from ..client.run_client import RunClient
from ..client.settings import read_settings
from .host import Host, HostPlace, find_place
from .script import drop_frames, hide_frames, outcome_of, watch_end

ALONE = (
    "gradpost: GRADPOST_COORDINATOR is not set, so this process trains alone. To train on a cluster: gradpost up -- "
    "python train.py"
)

_current: Session | None = None


class Session:
    """Rank, world size and the connection to the cluster. Made by `connect`.

    It leaves the run by itself when the script ends: as done, or as failed if an exception ended it.
    """

    def __init__(self, coordinator: str | None = None, **arguments: Unpack[TrainerArguments]) -> None:
        self.client, place = _make_client(coordinator, **arguments)
        self.io = self.client.io
        self.host = None if place is None else Host(place, self.client)
        self._joined = self.client.join() if self.host is None else self.host.join(self.client.join)
        self._pid = os.getpid()
        self._is_open = True
        self._reported: set[str] = set()  # names
        self.finish: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        who = f"trainer {self._joined.rank} of {self._joined.world_size}"
        if self.host is not None:
            who += f" | process {self.host.place.process} of {self.host.place.num_processes}"
        return f"<Session [{who} | run {self.run} | mode {self.mode} | {state}]>"

    @property
    def rank(self) -> Rank:
        """This trainer's rank, from 0; where a host with several processes is a trainer, that of this process."""
        return self._joined.rank if self.host is None else self.host.place.rank

    @property
    def world_size(self) -> int:
        """The number of trainers or, with several processes on a host, of processes."""
        return self._joined.world_size if self.host is None else self.host.place.world_size

    @property
    def run(self) -> str:
        """The identity of the run."""
        return self._joined.run

    @property
    def mode(self) -> Mode:
        """The mode that the servers run."""
        return self._joined.consistency.mode

    @property
    def strategy(self) -> Strategy | Literal["local"]:
        """The strategy: pservers aggregate gradients, the trainers in a ring, or this process trains alone."""
        return self.client.settings.strategy or self._joined.consistency.strategy

    @property
    def round(self) -> Round:
        """The newest round that was pulled, or taken in a ring."""
        return self.client.coordinator.round

    @property
    def is_open(self) -> bool:
        """True while this trainer is in the run; False in a process that was forked from it."""
        return self._is_open and os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child: a fork copies the memory of a process, and none of its threads."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"process {self._pid} joined the run, and process {os.getpid()}, which was forked from it, has none of "
                "its connections: call connect() in the child process that trains, and not before it is forked"
            )

    def check_open(self, call: str) -> None:
        """Raise RuntimeError unless this process is still in the run; `call` is named in the error."""
        self.check_process()
        if not self._is_open:
            raise RuntimeError(
                f"the session is closed, and this trainer has left the run: call {call} before close(), or before the "
                "`with` block or the script ends"
            )

    def report(self, **results: float) -> None:
        """Report numbers of the run, such as `loss` or `accuracy`; `gradpost up` and `status` show the latest.

        Does not block: they travel with the next heartbeat, and stand on the trainer's `/metrics`. The summary contains
        the numbers of the lowest rank, and of a host's processes those of the first. Its line omits `loss`, which is
        progress and not a result. Raises ValueError for more than 256 names, or one that is longer than 200 characters,
        cannot be printed or begins with `gradpost/`.
        """
        self.check_open("report()")
        update = {check_result_name(name): float(value) for name, value in results.items()}
        if taken := [name for name in update if name.startswith(OWN_RESULTS)]:
            raise ValueError(
                f"names that begin with {OWN_RESULTS} are those of curves of Gradpost; rename {taken[0]!r}"
            )
        names = self._reported | update.keys()
        if len(names) > MAX_RESULTS:
            raise ValueError(f"a trainer reports at most {MAX_RESULTS} results; this call would make {len(names)}")
        self._reported = names
        for name, value in update.items():
            self.client.metrics.reported.labels(name).set(value)
        self.client.coordinator.report_results(update)

    def summary(self) -> RunSummary:
        """Return the run in a few numbers, as the servers saw it. Blocks for an answer of the coordinator."""
        self.check_process()
        return self.client.coordinator.summary()

    def close(self, outcome: str = "done", reason: str = "", code: str | None = None) -> None:
        """Leave the run, `done` or `failed`. Blocks for steps that are on their way if done; safe to call twice.

        `code` is that of the error that ended the script, if it was an error of Gradpost.

        In a ring a trainer that is done takes part in the others' rounds, without gradients, and leaves with them.
        """
        global _current
        # A forked child (a data loader's worker) has neither the thread nor the connections.
        if not self.is_open:
            return
        self._is_open = False
        if _current is self:
            _current = None
        try:
            if outcome == "done":
                outcome, reason, code = self._finish_steps()
            self.client.leave(outcome, reason, code)
        except Exception as error:
            print(f"gradpost: leaving the run failed, and it counts as lost: {error!r}", file=sys.stderr)
        finally:
            self.client.coordinator.stop_heartbeats()

    def _close_after(self, error: BaseException | None) -> None:
        """Close the session with the outcome of a script that `error` ended, or that is done."""
        drop_frames(error)
        self.close(*outcome_of(error))

    def _finish_steps(self) -> tuple[str, str, str | None]:
        """Finish what the engine has left to do; return the outcome, its reason and its code."""
        try:
            self.io.run(self.client.finish())
            self.finish()
        except GradpostError as error:
            return outcome_of(error)
        except BaseException as error:  # an interrupt: the others cannot go on without this one, and hear of it now
            self.client.leave(*outcome_of(error))
            raise
        return outcome_of(None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close_after(error)


def _make_client(coordinator: str | None, **arguments: Unpack[TrainerArguments]) -> tuple[RunClient, HostPlace | None]:
    """Make the client. A trainer with an explicit rank or world size is a single process."""
    is_told = arguments.get("rank") is not None or arguments.get("world_size") is not None
    place = None if is_told else find_place(os.environ)
    settings = read_settings(coordinator=coordinator, **arguments)
    if place is not None and settings.one_trainer_per_host:
        own = {"rank": place.trainer, "world_size": place.num_trainers}
        return RunClient(settings.model_copy(update=own)), place
    if settings.trains_alone:
        print(ALONE, file=sys.stderr)
        settings = settings.model_copy(update={"strategy": "local"})
    return RunClient(settings), None


@hide_frames
def connect(coordinator: str | None = None, **arguments: Unpack[TrainerArguments]) -> Session:
    """Join the run and return the session; the same open session if called again without arguments.

    Call it first, to know rank and world size before the data is loaded. An argument that is None comes from the
    settings: `GRADPOST_COORDINATOR`, `RANK`, `WORLD_SIZE`. Further arguments are other settings of a trainer
    (docs/settings.md). Without all of them this process trains alone, as with `strategy="local"`. Blocks until the
    coordinator has a place; raises Unreachable if it does not answer, Conflict if there is none, or if the run is not
    what `expect={"mode": "sync"}` says.
    """
    global _current
    if (current := _current) is not None and current.is_open:
        if any(value is not None for value in (coordinator, *arguments.values())):
            raise RuntimeError(
                f"this process is in a session already: {current!r}. Pass its arguments to the first connect(), "
                "or close it first."
            )
        return current
    session = _current = Session(coordinator, **arguments)
    watch_end(_leave, os.getpid())
    return session


def use_session(session: Session | None, coordinator: str | None, **arguments: Unpack[TrainerArguments]) -> Session:
    """Return the given session, the open one, or a new one.

    Raises TypeError for arguments that come too late, and RuntimeError if the open one is that of a parent process.
    """
    if session is None and _current is not None:
        _current.check_process()
        session = _current if _current.is_open else None
    if session is None:
        return connect(coordinator, **arguments)
    if coordinator is not None:
        raise CallError("coordinator can be set only before the trainer joins. Pass it to connect()")
    session.client.configure(**arguments)
    return session


def _leave(error: BaseException | None) -> None:
    if _current is not None:
        _current._close_after(error)
