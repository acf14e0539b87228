"""Clusters that the tests of a module share, and a session of the one that has a single trainer.

Tests with a `carrier` go over TCP, as between machines; others over Unix sockets, as on one host by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypedDict

import pytest

from trainer_client import Session
from trainer_client.testing import LocalCluster

StartCluster = Callable[..., LocalCluster]


class Carrier(TypedDict):
    """Settings of the services."""

    local_transport: bool


@pytest.fixture(scope="session")
def carrier() -> Carrier:
    return {"local_transport": False}


@contextmanager
def starting_clusters(carrier: Carrier) -> Iterator[StartCluster]:
    running: dict[str, LocalCluster] = {}
    with ExitStack() as stack:

        def start(**settings: Any) -> LocalCluster:
            given = {"pservers": 2, "trainers": 2, "lease_seconds": 2, **carrier, **settings}
            if given.get("strategy") == "ring":
                given["pservers"] = 0
            key = repr(sorted(given.items()))
            if key not in running:
                running[key] = stack.enter_context(LocalCluster(**given))
            return running[key]

        yield start


@pytest.fixture(scope="module")
def shared_cluster(carrier: Carrier) -> Iterator[StartCluster]:
    """Start a cluster over TCP, or return the module's cluster with these settings, which runs already."""
    with starting_clusters(carrier) as start:
        yield start


@pytest.fixture
def own_cluster(carrier: Carrier) -> Iterator[StartCluster]:
    """Start a cluster over TCP for one test."""
    with starting_clusters(carrier) as start:
        yield start


@pytest.fixture(scope="module")
def pair(shared_cluster: StartCluster) -> LocalCluster:
    """Two pservers and two trainers."""
    return shared_cluster(on_trainer_loss="fail")


@pytest.fixture(scope="module")
def alone(shared_cluster: StartCluster) -> LocalCluster:
    """Two pservers and one trainer."""
    return shared_cluster(trainers=1, on_trainer_loss="fail")


@pytest.fixture(scope="module")
def ring(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(strategy="ring")


@pytest.fixture
def session(alone: LocalCluster) -> Iterator[Session]:
    with Session(coordinator=alone.address, rank=0, world_size=1) as session:
        yield session
