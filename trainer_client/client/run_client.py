"""A trainer's client: it joins a run, declares the model, and leaves. Its `pservers` exchange the tensors."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Unpack

from structlog.typing import FilteringBoundLogger

from ps_config.control_client import make_blocking_client
from ps_config.environment import CallError
from ps_config.tokens import TokenPair
from ps_protocol.errors import RolledBack
from ps_protocol.fence import Fence
from ps_protocol.messages import DeclareModel, PlanReady, PserverInfo, TrainerJoined
from ps_protocol.optimizers import OptimizerSpec
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PROTOCOL_VERSION, ParameterSpec, Rank, Round

from ..transport.exchange import Exchange, Started
from ..transport.work import Work
from .arguments import TrainerArguments
from .coordinator_client import CoordinatorClient
from .place import LocalCoordinator, TrainerPlace
from .pserver_client import PserverClient
from .pserver_connection import PserverConnection
from .pserver_group import DeclaredRun, PserverGroup
from .round_results import RoundResults
from .settings import TrainerSettings, read_settings
from .telemetry import MetricsServer, TrainerMetrics

# Settings that a trainer declares with its model, so that they may still be chosen after it has joined.
_OF_THE_MODEL = DeclareModel.model_fields.keys() & TrainerSettings.model_fields.keys()
DECLARED_SETTINGS = _OF_THE_MODEL | {"bucket_bytes", "overlap", "overlap_pulls"}


class RunClient:
    """A trainer's client in one run. Its methods block; the pservers' are work of `io`.

    It has a place in the run (`joined`) from `join` on, and a plan and pservers (`run`, `pservers`) from `declare` on.
    Waits end with the error that ended the run (`TrainerLost`, `RoundTimeout`, …).
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        self.metrics = TrainerMetrics()
        self.results = RoundResults()
        self.steps: list[Started[None]] = []  # that have begun; some may be done
        self.uploader: Rank | None = None  # the trainer that brings the initial values
        self.is_declared = False  # True once all trainers have declared the same model, and there is a plan
        self.run: DeclaredRun
        self.pservers: PserverGroup
        self.at_leave: list[Callable[[], None]] = []
        self._metrics_server: MetricsServer | None = None
        token = self.settings.sent_token
        self._token = None if token is None else TokenPair(token, lambda line: self.log.warning(line))
        self._control = make_blocking_client(self.settings.client_tls, self._token)
        self.io = Exchange(self.settings.client_tls, self._token)
        self.coordinator: TrainerPlace = (
            LocalCoordinator(self.settings)
            if self.settings.strategy == "local"
            else CoordinatorClient(self.settings, self._control)
        )
        self.coordinator.news.wake = self.io.wake

    @property
    def log(self) -> FilteringBoundLogger:
        """The trainer's log; its lines carry the run and the rank."""
        return self.coordinator.log

    @property
    def joined(self) -> TrainerJoined:
        """The place in the run."""
        return self.coordinator.joined

    @property
    def must_upload(self) -> bool:
        """True if this trainer pushes the values that its attempt of the run begins with."""
        return self.coordinator.news.attempt.uploader == self.joined.rank

    def configure(self, **arguments: Unpack[TrainerArguments]) -> None:
        """Change settings that count from the declaration of the model on; None changes nothing.

        Raises TypeError for any other setting, which was decided when the trainer joined.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        if late := given.keys() - DECLARED_SETTINGS:
            raise CallError(
                f"{', '.join(sorted(late))} can be set only before the trainer joins. Pass it to connect(); later "
                f"a script may set only {', '.join(sorted(DECLARED_SETTINGS))}"
            )
        changed = read_settings(**given)
        self.settings = self.settings.model_copy(update={name: getattr(changed, name) for name in given})

    # ------------------------------------------------------------------ life

    def join(self) -> TrainerJoined:
        """Join the run that is gathering. Waits for the coordinator, and for an earlier run to end.

        It also waits up to `retry_seconds` for the token's file, and raises SettingsError if there is none.
        """
        settings, address = self.settings, None
        try:
            if self._token is not None:
                for seconds in self._token.wait_for_token(settings.retry_seconds, self.log.info):
                    time.sleep(seconds)
            if settings.metrics_port is not None and self._metrics_server is None:
                self._metrics_server = MetricsServer(
                    self.metrics.registry, settings.metrics_host, settings.metrics_port, settings.server_tls
                )
                address = self._metrics_server.address
            return self.coordinator.join(address)
        except BaseException:
            self.leave("failed")  # closes the connections and the metrics port
            raise

    def begin_run(self, run: DeclaredRun, clients: Sequence[PserverClient] = ()) -> None:
        """Adopt the declared run. The follower processes of a host have no clients of pservers."""
        self.is_declared = True
        self.run = run
        self.pservers = PserverGroup(clients, run, self.coordinator, self.results, self.metrics)

    def adopt_results(self, round_: Round, skipped: Collection[Round], grad_norm: float | None) -> None:
        """Adopt the results of a round that this client has not pulled: in a ring, or from a host's leader."""
        self.coordinator.adopt_round(round_)
        self.results.skipped, self.results.grad_norm = skipped, grad_norm

    def declare(
        self,
        parameters: Sequence[ParameterSpec],
        optimizer: OptimizerSpec,
        buffers: Sequence[tuple[str, tuple[int, ...], str]] = (),
        aliases: Mapping[str, str] | None = None,
        rendezvous: str | None = None,
    ) -> SlicePlan:
        """Declare the model, and wait until all trainers have declared the same and the pservers have the plan.

        `aliases` are further names of tied tensors (alias -> name), which exported models have, too. `rendezvous` is
        the address at which the trainers of a ring meet, from the lowest rank.
        """
        message = DeclareModel(
            run=self.joined.run,
            incarnation=self.joined.incarnation,
            parameters=tuple((p.name, p.shape, p.dtype, p.group) for p in parameters),
            buffers=tuple(buffers),
            sparse=tuple(p.name for p in parameters if p.is_sparse),
            optimizer=optimizer.name,
            group_flags=optimizer.group_flags,
            members=optimizer.members,
            aliases=dict(aliases or {}),
            rendezvous=rendezvous,
            **self.settings.model_dump(include=_OF_THE_MODEL),
        )
        ready = self.coordinator.declare(message)
        clients = [self._make_client(info, ready) for info in ready.pservers]
        run = DeclaredRun(ready.plan, ready.start, ready.nonfinite, ready.max_grad_norm, ready.rendezvous)
        self.begin_run(run, clients)
        self.uploader = ready.uploader
        self.coordinator.pservers = [client.connection for client in clients]
        self.metrics.local_pservers.set_function(lambda: sum(client.connection.is_local for client in clients))
        if ready.start > 1:
            self.log.info(
                f"continuing run {ready.run} at round {ready.start - 1}: a script that counts its steps begins there"
            )
        with contextlib.suppress(RolledBack):  # the next request meets it again
            self.io.run(self.pservers.ask_all(lambda client: client.warm_up()))
        return ready.plan

    def _make_client(self, info: PserverInfo, ready: PlanReady) -> PserverClient:
        fence = Fence(
            protocol=PROTOCOL_VERSION,
            run=ready.run,
            attempt=ready.attempt,
            plan=ready.digest,
            pserver=info.index,
            pserver_incarnation=info.incarnation,
            rank=self.joined.rank,
            trainer_incarnation=self.joined.incarnation,
            round=0,
        )
        connection = PserverConnection(
            info,
            fence,
            self.io,
            self.metrics,
            self.coordinator.news,
            retry_seconds=self.settings.retry_seconds,
            deadline_seconds=self.joined.round_timeout_seconds + 30,
            uses_local=self.settings.local_transport,
        )
        return PserverClient(connection, max_delay=self.joined.consistency.max_delay)

    def go_back(self) -> Round:
        """Follow the run to its newest attempt after RolledBack, and return the version to pull next.

        No request may be under way. `must_upload` says if this trainer pushes the values of that version first.
        """
        attempt = self.coordinator.news.adopt_newest_attempt()
        self.pservers.follow(attempt)
        if attempt.uploader is not None:
            self.uploader = attempt.uploader
        self.results.skipped = ()
        self.coordinator.adopt_round(attempt.base_round)
        return attempt.base_round

    def finish(self) -> Work[None]:
        """Wait until every step that has begun is pulled, or has failed."""
        for started in self.steps:
            while started.can_go_on:
                yield math.inf

    def leave(self, outcome: str = "done", reason: str = "", code: str | None = None) -> None:
        """Leave the run, `done` or `failed` (also if that is in the middle of a round), and close all connections."""
        self.coordinator.leave(outcome, reason, code)
        for close in self.at_leave:
            close()
        self._control.close()
        self.io.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
