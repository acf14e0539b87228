"""One run of `gradpost up`: starts the cluster and the scripts, supervises them, and ends all of them."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ps_config.environment import find_setting
from ps_config.hosts import ListenError
from ps_protocol.errors import GradpostError, ModelMismatch, RunStopped
from ps_protocol.messages import ClusterStatus, RunSummary
from ps_protocol.vocabulary import Round
from services.runtime.checkpoints import complete_checkpoints
from services.runtime.storage import open_checkpoint_storage
from trainer_client.testing import Child, LocalCluster
from trainer_client.testing.processes import Inherited

from ..output import EXIT_FAILED, count
from ..state_folder import ADDRESS
from .ending import (
    EXIT_NOT_EXECUTABLE,
    HOPELESS_GRACE_SECONDS,
    STOP_GRACE_SECONDS,
    Ending,
    blame,
    describe_end,
    end_by_script,
    end_by_signal,
)
from .progress import Progress, print_summary
from .screen import Screen
from .standbys import Standbys

T = TypeVar("T")

TICK_SECONDS = 0.05
COORDINATOR_RESTARTS = 3  # also without --max-restarts: the rounds continue meanwhile, and nothing is lost
JOIN_CHECK_SECONDS = 1.0
JOIN_GRACE_SECONDS = 3.0  # before a script that ended without joining ends the run


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `gradpost up` that are no settings of the cluster."""

    max_restarts: int = 0  # of each process
    standbys: int = 0  # of each pserver
    run_name: str | None = None
    keep: bool = False  # leave the services up after the run, until a signal
    verbose: bool = False
    as_json: bool = False


class LocalRun:
    """The processes of one run. `command` is an executable and its arguments."""

    def __init__(
        self,
        command: Sequence[str],
        num_pservers: int,
        num_trainers: int,
        settings: Mapping[str, Any],
        environ: Mapping[str, str],
        options: UpOptions,
        *,
        tolerates_losses: bool,
        has_log: bool,
        resume_command: str,
    ) -> None:
        self._command = list(command)
        self._options = options
        self._state_dir: Path = settings["state_dir"]
        self._signals: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._screen = Screen(
            verbose=options.verbose, as_json=options.as_json, on_closed=lambda: self._signals.put(signal.SIGPIPE)
        )
        self._cluster = LocalCluster(
            pservers=num_pservers,
            trainers=num_trainers,
            on_line=self._screen.show_line,
            environ=environ,
            **settings,
        )
        # A single script has the terminal for itself: a debugger reads from it, and a progress bar draws on it.
        self._inherited: Inherited = ["stdin"] if num_trainers == 1 else []
        if num_trainers == 1 and self._screen.is_terminal and sys.stdin.isatty():
            self._inherited = ["stdin", "output"]
        self._restarts_left: defaultdict[str, int] = defaultdict(lambda: options.max_restarts)  # by the child's name
        self._restarts_left["coordinator"] = max(options.max_restarts, COORDINATOR_RESTARTS)
        if options.standbys and has_log:  # for a pserver that dies before a standby is in sync
            self._restarts_left |= {f"pserver {index}": max(options.max_restarts, 1) for index in range(num_pservers)}
        self._warn = partial(self._screen.print_message, style="yellow")
        self._standbys = Standbys(self._cluster, options.standbys, self._warn)
        self._tolerates_losses = tolerates_losses
        self._place = settings.get("checkpoints") or find_setting("checkpoints") or str(self._state_dir / "checkpoints")
        self._has_log = has_log
        self._resume_command = resume_command
        self._ending: Ending | None = None
        self._codes: dict[int, int] = {}  # of scripts that have ended
        self._ended_at: dict[int, float] = {}
        self._ended_by_us: set[int] = set()
        self._next_join_check = 0.0

    def run(self) -> int:
        """Return the exit code: that of the first failing script, 128 + the signal that ended it, 1, or 0.

        If the run tolerates losses, it is 0 if the remaining trainers finish it.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
                signal.signal(number, lambda received, _: self._signals.put(signal.Signals(received)))
        summary = None
        try:
            if self._start():
                with (
                    Progress(self._cluster.view, self._is_interrupted, self._warn) as progress,
                    contextlib.ExitStack() as shown,
                ):
                    if "output" not in self._inherited:
                        shown.enter_context(self._screen.live(progress.render))
                    self._watch()
                was_interrupted = self._is_interrupted()
                self._find_cause()
                summary = self._ask(self._cluster.summary) or progress.summary
                if self._options.keep and not was_interrupted and all(s.is_running for s in self._cluster.services):
                    exit_code = self._report(summary)
                    self._screen.print_message(f"the services stay up until Ctrl-C; dashboard: {self._cluster.address}")
                    self._signals.get()
                    return exit_code
        finally:
            self._cluster.stop(STOP_GRACE_SECONDS)
        return self._report(summary)

    def _report(self, summary: RunSummary | None) -> int:
        """Print the summary and how the run ended, and return the exit code."""
        if summary is not None and summary.state != "gathering":
            shown, outcome = summary, "interrupted" if self._is_interrupted() else None
            if self._ending is not None and self._ending.exit_code != 0:
                shown = summary.model_copy(update={"state": "failed"})  # also if the cluster has finished it
            print_summary(shown, outcome, as_json=self._options.as_json)
        if self._ending is not None:
            self._screen.print_message(self._describe_ending(self._ending, summary), "red")
        if self._ending is None and summary is not None and summary.state == "failed":
            return EXIT_FAILED  # every script has ended well, and the model was lost afterwards
        return self._ending.exit_code if self._ending else 0

    def _describe_ending(self, ending: Ending, summary: RunSummary | None) -> str:
        """Return the reason and, if the run has trained, how to continue it."""
        if summary is None or not summary.rounds or not self._resume_command:
            return ending.reason
        if summary.state == "finished" and ending.exit_code != 0:  # nothing is left to train
            return ending.reason
        reached = f"{ending.reason} (at round {summary.rounds:,})"
        if self._has_log:
            return f"{reached}. Continue: {self._resume_command}"
        if saved := self._find_checkpoint(summary.run):
            return f"{reached}. Continue from the checkpoint of round {saved:,}: {self._resume_command}"
        return f"{reached}. No model was saved: the script starts again from the beginning, or from its own checkpoint"

    def _find_checkpoint(self, run: str) -> Round | None:
        """Return the round of the newest complete checkpoint; None if there is none, or none can be read."""
        with contextlib.suppress(OSError, ValueError, ImportError):
            for manifest in complete_checkpoints(open_checkpoint_storage(self._place), run):
                return manifest.round
        return None

    def _is_interrupted(self) -> bool:
        return self._ending is not None and self._ending.by_signal

    def _start(self) -> bool:
        cluster, now, file = self._cluster, time.monotonic(), self._state_dir / ADDRESS
        try:
            cluster.launch()
            self._standbys.start()
            pservers = f"{count(cluster.num_pservers, 'pserver')} and " if cluster.num_pservers else ""
            trainers = count(cluster.num_trainers, "trainer")
            self._screen.print_message(f"{pservers}{trainers}; dashboard: {cluster.address}", "dim")
            file.write_text(cluster.address)
            for rank in range(cluster.num_trainers):
                self._start_script(rank)
            cluster.wait_for_coordinator(give_up=lambda: not self._signals.empty())
        except ListenError as error:
            self._ending = Ending(EXIT_FAILED, str(error), now)
        except RuntimeError:
            if self._signals.empty():
                coordinator = self._cluster.coordinator
                why = self._screen.problems.get(coordinator.name)
                self._report_death(coordinator, f"did not start: {why}" if why else "did not start")
            else:
                self._ending = end_by_signal(self._signals.get(), now)
        except OSError as error:
            if error.filename == str(file):
                self._ending = Ending(EXIT_FAILED, f"{file} cannot be written: {error.strerror}", now)
            else:
                reason = f"{self._command[0]} cannot be run: {error.strerror}"
                self._ending = Ending(EXIT_NOT_EXECUTABLE, reason, now)
        return self._ending is None

    def _start_script(self, rank: int) -> None:
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
            with contextlib.suppress(queue.Empty):
                self._handle_signal(self._signals.get(timeout=TICK_SECONDS))
            for rank, trainer in enumerate(trainers):
                if rank not in self._codes and not trainer.is_running:
                    self._handle_end(rank, trainer.wait())
            if self._ending is None:
                self._check_services()
                self._standbys.check()
                self._check_joins()
            if self._ending is not None:
                self._send_signals(self._ending)

    def _handle_signal(self, received: signal.Signals) -> None:
        now = time.monotonic()
        if self._ending is None:
            self._ending = end_by_signal(received, now)
            if received == signal.SIGINT:
                self._screen.hides_interrupts = True
        else:
            self._ending.hurry(now)

    def _handle_end(self, rank: int, code: int) -> None:
        now = time.monotonic()
        if rank not in self._ended_by_us:
            status = self._leave_for(rank, None if code == 0 else f"its process {describe_end(code)}")
            is_finished = status is not None and status.state == "finished"  # there is nothing left to train
            if code != 0 and not is_finished and self._may_restart(f"trainer {rank}", describe_end(code)):
                self._start_script(rank)
                return
        self._codes[rank], self._ended_at[rank] = code, now
        if rank in self._ended_by_us:
            return
        if code != 0 and self._ending is None:
            status = self._ask(self._cluster.status)
            others_know = status is not None and status.failure is not None
            has_begun = status is not None and status.state != "gathering"
            if self._tolerates_losses and has_begun and not others_know:
                self._warn(f"trainer {rank} was lost: its process {describe_end(code)}")
            else:
                self._ending = end_by_script(rank, code, now, others_know=others_know)

    def _leave_for(self, rank: int, reason: str | None) -> ClusterStatus | None:
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
        for service in self._cluster.services:
            is_pserver = service in self._cluster.pservers
            if service.is_running or (
                is_pserver and self._standbys.replace(self._cluster.pservers.index(service), service)
            ):
                continue
            how = describe_end(service.wait())
            if is_pserver and self._options.standbys:
                how += ", and no standby could replace it yet"
            if not self._may_restart(service.name, how):
                self._report_death(service, how)
                return
            try:
                self._cluster.restart(service)
            except (RuntimeError, ListenError):
                self._report_death(service, "did not start again")
                return

    def _may_restart(self, name: str, how: str) -> bool:
        """Use one of the restarts that this process has left, if any, and report it."""
        if self._ending is not None or self._restarts_left[name] == 0:
            return False
        self._restarts_left[name] -= 1
        self._warn(f"{name} {how}; starting it again ({self._restarts_left[name]} restarts left)")
        return True

    def _check_joins(self) -> None:
        """End the run if a script ended well without joining: the others would wait for it indefinitely."""
        now = time.monotonic()
        ended = {rank for rank, at in self._ended_at.items() if now - at > JOIN_GRACE_SECONDS}
        if not ended or now < self._next_join_check:
            return
        self._next_join_check = now + JOIN_CHECK_SECONDS
        status = self._ask(self._cluster.status)
        if status is None or status.state != "gathering":
            return
        joined = {trainer.rank for trainer in status.trainers}
        if joined and (missed := ended - joined):
            names = [" and ".join(f"trainer {rank}" for rank in sorted(ranks)) for ranks in (missed, joined)]
            self._ending = Ending(EXIT_FAILED, f"{names[0]} ended without joining the run; {names[1]} waited", now)

    def _send_signals(self, ending: Ending) -> None:
        now = time.monotonic()
        for rank, trainer in enumerate(self._cluster.trainers):
            if not trainer.is_running:
                continue
            if now >= ending.kill_at:
                trainer.signal(signal.SIGKILL)
            elif now >= ending.signal_at and rank not in self._ended_by_us:
                trainer.signal(ending.stop_signal)
            else:
                continue
            self._ended_by_us.add(rank)

    # ------------------------------------------------------------------ the end

    def _find_cause(self) -> None:
        status = self._ask(self._cluster.status)
        if status is not None and status.failure is not None and status.failure["code"] == ModelMismatch.code:
            self._resume_command = ""  # it would fail again
        lost = [rank for rank, code in self._codes.items() if code != 0]
        if self._ending is None and lost:  # the run continued without them, if it could
            is_finished = status is not None and status.state == "finished"
            if not is_finished or len(lost) == len(self._codes):
                self._ending = end_by_script(lost[0], self._codes[lost[0]], time.monotonic(), others_know=True)
        elif self._ending is None and (status is None or status.state == "gathering"):
            has_joined = any(event["kind"] == "trainer" for event in self._ask(self._cluster.view.events) or ())
            why = "the script connected, but never made a RemoteOptimizer" if has_joined else "no script connected"
            self._ending = Ending(EXIT_FAILED, f"nothing was trained: {why}", time.monotonic())
        if status is not None and status.failure is not None and status.failure["code"] == RunStopped.code:
            code = EXIT_FAILED if status.state == "failed" else 0
            self._ending = Ending(code, status.failure["detail"], time.monotonic())
        elif self._ending is not None and status is not None and status.failure is not None:
            failure = status.failure
            self._ending = blame(self._ending, self._codes, failure, self._ended_by_us)
            if self._ending.by_script and "its process" not in failure["detail"]:  # it has the script's exception
                self._ending.reason = failure["detail"]
        elif self._ending is not None and self._ending.exit_code == EXIT_FAILED:
            name = f"trainer {self._ending.rank}"
            if exception := self._screen.exceptions.get(name):  # it ended before the run began
                self._ending.reason = f"{name} failed: {exception}"

    def _report_death(self, service: Child, how: str) -> None:
        self._screen.reveal(service.name)
        self._ending = Ending(EXIT_FAILED, f"{service.name} {how}", time.monotonic() + HOPELESS_GRACE_SECONDS)

    def _ask(self, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except GradpostError:
            return None
