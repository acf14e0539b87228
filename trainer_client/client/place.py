"""A trainer's place in a run, and the answers that a trainer without a cluster gives itself."""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog
from structlog.typing import FilteringBoundLogger, Processor
from typing_extensions import override

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict
from ps_protocol.fields import Mean, ScriptInfo
from ps_protocol.messages import DeclareModel, PlanReady, RunSummary, TrainerJoined
from ps_protocol.plan import make_ring_plan
from ps_protocol.printable import escape_event
from ps_protocol.vocabulary import ParameterSpec, Round

from .news import News
from .pserver_connection import PserverConnection
from .settings import TrainerSettings

LOCAL = "local"  # the run and the transport of a trainer without a cluster
# Between the processes of a host, which are one trainer.
LOCAL_LEASE_SECONDS = 10.0
LOCAL_TIMEOUT_SECONDS = 600.0


class TrainerPlace(ABC):
    """One trainer's place in one run: what it has reached there, and what it reports."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.joined: TrainerJoined
        self.round: Round = 0  # the newest round that was pulled from every pserver
        self.counted_round: Round = 0  # the newest round that pservers may count this trainer in
        self.results: dict[str, float] = {}
        command = shlex.join(sys.argv).encode(errors="replace").decode()
        self.script = ScriptInfo(command=command, run_name=settings.run_name)
        self.news = News()
        self.pservers: Sequence[PserverConnection] = ()
        self.log = make_log()
        self.is_done = False  # in a ring: no batches are left, and the trainer joins the others' rounds
        self._settings = settings
        self._means: dict[str, Mean] = {}  # of the values that no answered heartbeat has carried
        self._means_lock = threading.Lock()
        self._waiting_since: float | None = None  # in a ring; None: the trainer computes

    @abstractmethod
    def join(self, metrics_address: str | None) -> TrainerJoined:
        """Join the run."""

    @abstractmethod
    def declare(self, message: DeclareModel) -> PlanReady:
        """Declare the model, and wait until all trainers have and the pservers have the plan."""

    @abstractmethod
    def summary(self) -> RunSummary:
        """Return the results of the run."""

    def leave(self, outcome: str, reason: str = "", code: str | None = None) -> None:  # noqa: B027
        """Report the end of this trainer to the others, of which there are none without a cluster."""

    def stop_heartbeats(self) -> None:  # noqa: B027
        """Let one more heartbeat be the last, if there are any. Does not block."""

    def adopt_place(self, joined: TrainerJoined, process: int) -> None:
        """Adopt the leader's place in the run, without heartbeats. Follower processes of a host do not `join`."""
        self.joined = joined
        self.log = make_log(run=joined.run, trainer=joined.rank, process=process)

    def adopt_round(self, round_: Round) -> None:
        """Report this round as the newest with the heartbeats, also after a rollback to it. No round is under way."""
        self.round = round_
        self.counted_round = 0

    def note_pulled(self, round_: Round) -> None:
        """Note a round that was pulled from every pserver, and may not be the newest one."""
        self.round = max(self.round, round_)

    def report_results(self, results: Mapping[str, float]) -> None:
        """Report the newest numbers of the script with the heartbeats, and the means of all. Any thread may call it."""
        self.results.update(results)
        self.report_measures(results)

    def report_measures(self, measures: Mapping[str, float]) -> None:
        """Report the means of numbers that are curves only, such as those of `OWN_RESULTS`. Any thread may call it."""
        self._add_means({name: Mean(count=1, value=value) for name, value in measures.items()})

    def _add_means(self, means: Mapping[str, Mean]) -> None:
        with self._means_lock:
            for name, mean in means.items():
                self._means[name] = self._means[name].merge(mean) if name in self._means else mean

    def note_script(self, **changed: Any) -> None:
        """Change the description of the script that the heartbeats carry. Any thread may call it."""
        self.script = self.script.model_copy(update=changed)

    @contextlib.contextmanager
    def reporting_wait(self) -> Iterator[None]:
        """Report with the heartbeats that this trainer waits for others, in a ring. Any thread may call it."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None


class LocalCoordinator(TrainerPlace):
    """The answers of a coordinator to the only trainer of a run, without requests."""

    @override
    def join(self, metrics_address: str | None) -> TrainerJoined:
        """Return rank 0 of a run with the mode that the script expects. Raises Conflict for several trainers."""
        num_trainers = self._settings.world_size or 1
        if num_trainers > 1:
            text = "strategy local trains in one process, without a cluster; start one process, or use a cluster"
            raise Conflict(text, code="mode_mismatch", expected="world size 1", actual=num_trainers)
        expected: dict[str, Any] = {name: value for name, value in self._settings.expect.items() if name != "strategy"}
        self.joined = TrainerJoined(
            run=LOCAL,
            rank=0,
            world_size=1,
            incarnation=1,
            consistency=Consistency(**expected),
            lease_seconds=LOCAL_LEASE_SECONDS,
            round_timeout_seconds=LOCAL_TIMEOUT_SECONDS,
        )
        self.log = make_log(run=LOCAL, trainer=0)
        self._began = time.monotonic()
        return self.joined

    @override
    def declare(self, message: DeclareModel) -> PlanReady:
        """Return a plan without pservers."""
        plan = make_ring_plan([ParameterSpec(*fields) for fields in message.parameters], message.buffers)
        return PlanReady(
            run=LOCAL,
            attempt=0,
            plan=plan,
            digest=plan.digest,
            pservers=(),
            uploader=0,
            nonfinite=message.nonfinite or "reject",
            max_grad_norm=message.max_grad_norm,
        )

    @override
    def summary(self) -> RunSummary:
        """Return the run as this trainer has seen it."""
        return RunSummary(
            run=LOCAL,
            state="training",
            mode=self.joined.consistency.mode,
            transport=LOCAL,
            num_trainers=1,
            rounds=self.round,
            seconds=time.monotonic() - self._began,
            shards=(),
            results=dict(self.results),
        )


def make_log(**context: object) -> FilteringBoundLogger:
    """Return a logger bound to `context` (run, trainer, …). structlog's global configuration stays as it is."""
    is_terminal = sys.stderr.isatty()
    rendering: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if is_terminal:
        rendering = [escape_event, structlog.dev.ConsoleRenderer()]
    log: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        context_class=dict,
    )
    return log.bind(role="trainer", **context)
