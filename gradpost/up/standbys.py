"""The standbys of `gradpost up`: it reports processes that have ended, and starts further standbys."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from ps_protocol.errors import GradpostError
from ps_protocol.messages import ClusterStatus
from ps_protocol.vocabulary import PserverIndex
from trainer_client.testing import Child, LocalCluster

from .screen import describe_end

CHECK_SECONDS = 0.5
PROMOTION_SECONDS = 30.0  # after which a pserver counts as dead although a standby should have replaced it
MAX_DEATHS = 10  # of the standbys of one pserver, before one of them is in sync


class Standbys:
    """`num` standbys for each pserver, which replace it once they are in sync. `report` prints a message."""

    def __init__(self, cluster: LocalCluster, num: int, report: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._num = num
        self._report = report
        self._replaced_until: dict[Child, float] = {}  # pservers that have ended and are being replaced
        self._num_deaths: defaultdict[PserverIndex, int] = defaultdict(int)
        self._next_check = 0.0

    def start(self) -> None:
        """Start all standbys."""
        for index in range(self._cluster.num_pservers):
            for _ in range(self._num):
                self._cluster.start_standby(index)

    def replace(self, index: PserverIndex, pserver: Child) -> bool:
        """Return whether a standby replaces a pserver that has ended, which is reported to the coordinator."""
        if not self._num:
            return False
        if pserver not in self._replaced_until:
            self._replaced_until[pserver] = 0.0
            status = self._fetch_status()  # before a standby in sync becomes the pserver
            self._report_end(index, pserver)
            if status is not None and self._has_successor(index, status):
                self._report(f"{pserver.name} {describe_end(pserver.wait())}; a standby replaces it")
                self._replaced_until[pserver] = time.monotonic() + PROMOTION_SECONDS
        return time.monotonic() < self._replaced_until[pserver]

    def _has_successor(self, index: PserverIndex, status: ClusterStatus) -> bool:
        running = {self._cluster.find_address(child) for child in self._cluster.standbys if child.is_running}
        successors = {pserver.address for pserver in status.pservers if pserver.index == index}
        successors |= {s.address for s in status.standbys if s.follows == index and s.role == "in_sync"}
        return bool(running & successors)

    def check(self) -> None:
        """Note the standbys that have become pservers or have ended, and start others in their places."""
        if not self._num or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_SECONDS
        status, cluster = self._fetch_status(), self._cluster
        if status is None:
            return
        for pserver in status.pservers:
            for child in cluster.standbys:
                if child.is_running and cluster.find_address(child) == pserver.address:
                    cluster.exchange(pserver.index, child)
                    break
        for standby in status.standbys:
            if standby.role == "in_sync":
                self._num_deaths[standby.follows] = 0
        for child in [child for child in cluster.standbys if not child.is_running]:
            index = cluster.follows[child]
            self._num_deaths[index] += 1
            self._report_end(index, child)
            end = "" if self._num_deaths[index] <= MAX_DEATHS else "; no further one is started"
            self._report(f"{child.name} {describe_end(child.wait())}{end}")
            cluster.standbys.remove(child)
        for index in range(cluster.num_pservers):
            num_running = sum(cluster.follows[child] == index for child in cluster.standbys)
            may_start = num_running < self._num and self._num_deaths[index] <= MAX_DEATHS
            if may_start and (self._is_settled(index, status) or self._is_lost(index, status, num_running)):
                cluster.start_standby(index)

    def _is_settled(self, index: PserverIndex, status: ClusterStatus) -> bool:
        """Return whether training goes on: a process that starts would compete with the one that takes over."""
        pserver = next((pserver for pserver in status.pservers if pserver.index == index), None)
        if pserver is None or status.state != "training" or status.waiting_for:
            return False
        has_served = pserver.heartbeat.round > 0 or self._num_deaths[index] > 0
        return has_served and self._cluster.find_address(self._cluster.pservers[index]) == pserver.address

    def _is_lost(self, index: PserverIndex, status: ClusterStatus, num_running: int) -> bool:
        """Return whether the run waits for a pserver, or its standby, and a dead standby may have the newest state."""
        is_awaited = any(text.endswith(f"pserver {index}") for text in status.waiting_for)
        return not num_running and self._num_deaths[index] > 0 and is_awaited

    def _fetch_status(self) -> ClusterStatus | None:
        try:
            return self._cluster.status()
        except GradpostError:
            return None

    def _report_end(self, index: PserverIndex, child: Child) -> None:
        try:
            self._cluster.report_end(index, child)
        except GradpostError as error:  # the coordinator detects it, too, but later
            self._report(f"the coordinator was not notified of the end of {child.name}: {error}")
