"""One run of `gradpost up`: it starts the cluster and the scripts, watches them, and ends all of them. Three rules:

1. A script that fails ends all, with its exit code, unless it may be restarted or the run continues without it.
2. A service that dies ends all, with 1, unless it may be restarted or a standby replaces it.
3. The reason is the failure that the coordinator reports, if it reports one.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from signal import Signals
from typing import Any, TypeVar

from ps_config.hosts import ListenError
from ps_protocol.errors import GradpostError, ModelMismatch, RunStopped
from ps_protocol.messages import ClusterStatus, RunSummary
from ps_protocol.vocabulary import Rank
from services.coordinator.settings import CoordinatorSettings
from trainer_client.testing import Child, LocalCluster
from trainer_client.testing.processes import Inherited

from ..output import EXIT_FAILED, count
from ..runs import ADDRESS
from .screen import Screen, describe_end, print_summary, show_progress
from .standbys import Standbys

T = TypeVar("T")

EXIT_BY_SIGNAL = 128  # and its number, as in shells
TICK_SECONDS = 0.05
COORDINATOR_RESTARTS = 3  # also without --max-restarts: the rounds continue meanwhile, and nothing is lost
LEARN_SECONDS = 3.0  # for the other scripts to learn of a failure and print it
STOP_SECONDS = 3.0  # between the first signal and SIGKILL


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `gradpost up` that are no settings of the cluster."""

    max_restarts: int = 0  # of each process
    standbys: int = 0  # of each pserver
    run_name: str | None = None
    verbose: bool = False
    as_json: bool = False


@dataclass(slots=True)
class Ending:
    """An end before all scripts were done: running scripts get a signal at `signal_at`, and SIGKILL later."""

    exit_code: int
    reason: str
    signal_at: float  # by the monotonic clock
    stop_signal: Signals = signal.SIGTERM
    is_by_signal: bool = False  # which `gradpost up` has received
    is_signalled: bool = False

    def hurry(self, now: float) -> None:
        """Send the first signal now, or SIGKILL if it was sent already."""
        self.signal_at = now - STOP_SECONDS if self.signal_at <= now else now


class LocalRun:
    """The processes of one run. `command` is an executable and its arguments; `resume` is the command to continue."""

    def __init__(
        self,
        command: Sequence[str],
        num_trainers: int,
        settings: Mapping[str, Any],
        cluster_settings: CoordinatorSettings,
        environ: Mapping[str, str],
        options: UpOptions,
        resume: str,
    ) -> None:
        self._command, self._options, self._settings, self._resume = list(command), options, cluster_settings, resume
        self._address_file = settings["state_dir"] / ADDRESS
        self._signals: queue.SimpleQueue[Signals] = queue.SimpleQueue()
        self._screen = Screen(
            verbose=options.verbose, as_json=options.as_json, on_closed=lambda: self._signals.put(signal.SIGPIPE)
        )
        self._warn = partial(self._screen.print_message, style="yellow")
        self._cluster = LocalCluster(
            pservers=cluster_settings.wanted_pservers,
            trainers=num_trainers,
            on_line=self._screen.show_line,
            environ=environ,
            **settings,
        )
        self._standbys = Standbys(self._cluster, options.standbys, self._warn)
        # A single script has the terminal for itself: a debugger reads from it, and a progress bar draws on it.
        self._inherited: Inherited = ["stdin"] if num_trainers == 1 else []
        if num_trainers == 1 and self._screen.is_terminal and sys.stdin.isatty():
            self._inherited = ["stdin", "output"]
        self._restarts_left: defaultdict[str, int] = defaultdict(lambda: options.max_restarts)  # by the child's name
        self._restarts_left["coordinator"] = max(options.max_restarts, COORDINATOR_RESTARTS)
        if options.standbys:  # for a pserver that dies before a standby is in sync
            for index in range(self._cluster.num_pservers):
                self._restarts_left[f"pserver {index}"] = max(options.max_restarts, 1)
        self._ending: Ending | None = None
        self._codes: dict[Rank, int] = {}  # of scripts that have ended

    def run(self) -> int:
        """Return the exit code: that of the first failing script, 128 + the signal that ended it, 1, or 0."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
                signal.signal(number, lambda received, _: self._signals.put(Signals(received)))
        status, summary = None, None
        try:
            if self._start():
                with show_progress(self._screen, self._cluster.view, is_shown="output" not in self._inherited):
                    self._watch()
                status, summary = self._ask(self._cluster.status), self._ask(self._cluster.summary)
        finally:
            self._cluster.stop(STOP_SECONDS)
        return self._report(status, summary)

    def _start(self) -> bool:
        """Start all processes, and return whether that succeeded."""
        cluster = self._cluster
        try:
            cluster.launch()
            self._standbys.start()
            pservers = f"{count(cluster.num_pservers, 'pserver')} and " if cluster.num_pservers else ""
            trainers = count(cluster.num_trainers, "trainer")
            self._screen.print_message(f"{pservers}{trainers}; dashboard: {cluster.address}", "dim")
            self._address_file.write_text(cluster.address)
            for rank in range(cluster.num_trainers):
                self._start_script(rank)
            cluster.wait_for_coordinator(give_up=lambda: not self._signals.empty())
        except (ListenError, OSError) as error:
            self._end(str(error))
        except RuntimeError:
            if self._signals.empty():
                self._end_by_service(cluster.coordinator, "did not start")
            else:
                self._handle_signal(self._signals.get())
        return self._ending is None

    def _start_script(self, rank: Rank) -> None:
        own = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self._cluster.num_trainers)}  # as torchrun
        if self._options.verbose:
            own["GRADPOST_LOG_LEVEL"] = "debug"  # tracebacks with all frames
        if self._options.run_name is not None:
            own["GRADPOST_RUN_NAME"] = self._options.run_name
        self._cluster.start_trainer(rank, self._command, own, self._inherited)

    # ------------------------------------------------------------------ while it runs

    def _watch(self) -> None:
        """Return when all scripts have ended, by themselves or by a signal."""
        trainers = self._cluster.trainers
        while len(self._codes) < len(trainers):
            with suppress(queue.Empty):
                self._handle_signal(self._signals.get(timeout=TICK_SECONDS))
            for rank, trainer in enumerate(trainers):
                if rank not in self._codes and not trainer.is_running:
                    self._handle_end(rank, trainer.wait())
            if self._ending is None:
                self._check_services()
                self._standbys.check()
            else:
                self._stop_scripts(self._ending)

    def _handle_signal(self, received: Signals) -> None:
        now = time.monotonic()
        if self._ending is not None:
            self._ending.hurry(now)
            return
        is_interrupt = received == signal.SIGINT
        self._screen.hides_interrupts = is_interrupt
        reason = {signal.SIGINT: "interrupted", signal.SIGPIPE: "the reader of the output is gone"}.get(received)
        forwarded = signal.SIGINT if is_interrupt else signal.SIGTERM
        code = EXIT_BY_SIGNAL + received
        self._ending = Ending(code, reason or f"ended by {received.name}", now, forwarded, is_by_signal=True)

    def _handle_end(self, rank: Rank, code: int) -> None:
        """Apply the first rule to a script that has ended, and report its end to the coordinator."""
        if self._ending is not None:
            self._codes[rank] = code
            return
        how = describe_end(code)
        status = self._leave_for(rank, None if code == 0 else f"its process {how}")
        state = None if status is None else status.state
        if code != 0 and state != "finished" and self._may_restart(f"trainer {rank}", how):  # else all is trained
            self._start_script(rank)
            return
        self._codes[rank] = code
        continues = self._settings.on_trainer_loss == "continue" and status is not None and status.failure is None
        if code != 0 and continues and state != "gathering":
            self._warn(f"trainer {rank} was lost: its process {how}")
        elif code != 0:
            self._end_by_script(rank, code)
        elif state == "gathering":
            self._end(f"nothing was trained: trainer {rank} ended before all trainers had made a RemoteOptimizer")

    def _end_by_script(self, rank: Rank, code: int) -> None:
        self._end(f"trainer {rank} {describe_end(code)}", EXIT_BY_SIGNAL - code if code < 0 else code)

    def _end(self, reason: str, exit_code: int = EXIT_FAILED) -> None:
        self._ending = Ending(exit_code, reason, time.monotonic() + LEARN_SECONDS)

    def _leave_for(self, rank: Rank, reason: str | None) -> ClusterStatus | None:
        """Leave the run for a process that has ended, before its lease expires; return the earlier status.

        A trainer that left as done may still have exited with an error.
        """
        states = ("joined", "declared", "done") if reason else ("joined", "declared")
        if status := self._ask(self._cluster.status):
            for trainer in status.trainers:
                if trainer.rank == rank and trainer.state in states:
                    self._ask(partial(self._cluster.view.leave_for, status.run, trainer, reason))
        return status

    def _check_services(self) -> None:
        """Apply the second rule."""
        for service in self._cluster.services:
            is_pserver = service in self._cluster.pservers
            if service.is_running or (
                is_pserver and self._standbys.replace(self._cluster.pservers.index(service), service)
            ):
                continue
            how = describe_end(service.wait())
            try:
                if self._may_restart(service.name, how):
                    self._cluster.restart(service)
                    continue
            except (RuntimeError, ListenError):
                how = "did not start again"
            self._end_by_service(service, how)
            return

    def _end_by_service(self, service: Child, how: str) -> None:
        self._screen.reveal(service.name)
        self._end(f"{service.name} {how}")

    def _may_restart(self, name: str, how: str) -> bool:
        """Use one of the restarts that this process has left, if any, and report it."""
        if self._restarts_left[name] == 0:
            return False
        self._restarts_left[name] -= 1
        self._warn(f"{name} {how}; starting it again ({self._restarts_left[name]} restarts left)")
        return True

    def _stop_scripts(self, ending: Ending) -> None:
        now = time.monotonic()
        if now >= ending.signal_at + STOP_SECONDS:
            number = signal.SIGKILL
        elif now >= ending.signal_at and not ending.is_signalled:
            number, ending.is_signalled = ending.stop_signal, True
        else:
            return
        for trainer in self._cluster.trainers:
            trainer.signal(number)

    # ------------------------------------------------------------------ the end

    def _report(self, status: ClusterStatus | None, summary: RunSummary | None) -> int:
        """Print the summary and how the run ended, and return the exit code."""
        self._apply_failure(status)
        ending = self._ending
        if summary is not None and summary.state != "gathering":
            is_failed = ending is not None and ending.exit_code != 0  # also if the cluster has finished it
            shown = summary.model_copy(update={"state": "failed"}) if is_failed else summary
            outcome = "interrupted" if ending is not None and ending.is_by_signal else None
            print_summary(shown, outcome, as_json=self._options.as_json)
        if ending is None:
            return 0
        self._screen.print_message(ending.reason + self._describe_way_on(ending, summary), "red")
        return ending.exit_code

    def _apply_failure(self, status: ClusterStatus | None) -> None:
        """Apply the third rule, and the first one to a run that has continued without a script."""
        lost = {rank: code for rank, code in self._codes.items() if code != 0}
        is_finished = status is not None and status.state == "finished"
        if self._ending is None and lost and (not is_finished or len(lost) == len(self._codes)):
            self._end_by_script(*next(iter(lost.items())))
        failure = None if status is None else status.failure
        if failure is None or (self._ending is not None and self._ending.is_by_signal):
            return
        code = EXIT_FAILED if self._ending is None else self._ending.exit_code
        if failure["code"] == RunStopped.code and is_finished:
            code = 0
        if failure["code"] == ModelMismatch.code:
            self._resume = ""  # it would fail again
        self._end(failure["detail"], code)

    def _describe_way_on(self, ending: Ending, summary: RunSummary | None) -> str:
        """Return how to continue a run that has trained; empty if nothing is left to train."""
        is_over = summary is not None and summary.state == "finished" and ending.exit_code != 0
        if summary is None or not summary.rounds or not self._resume or is_over:
            return ""
        reached = f" (at round {summary.rounds:,})"
        if self._settings.strategy == "ring":
            return reached
        has_log = self._settings.log_durability != "none"
        source = "" if has_log else " from the newest checkpoint, if there is one"
        return f"{reached}. Continue{source}: {self._resume}"

    def _ask(self, question: Callable[[], T]) -> T | None:
        with suppress(GradpostError, RuntimeError):  # the latter if the cluster has been stopped
            return question()
        return None
