"""Clusters that the tests of a module share, over TCP, and a session of the one that has a single trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from gradpost import Session
from trainer_client.testing import LocalCluster

StartCluster = Callable[..., LocalCluster]


@contextmanager
def starting_clusters() -> Iterator[StartCluster]:
    running: dict[str, LocalCluster] = {}
    with ExitStack() as stack:

        def start(**settings: Any) -> LocalCluster:
            given = {"pservers": 2, "trainers": 2, "lease_seconds": 2, "local_transport": False, **settings}
            if given.get("strategy") == "ring":
                given["pservers"] = 0
            key = repr(sorted(given.items()))
            if key not in running:
                running[key] = stack.enter_context(LocalCluster(**given))
            return running[key]

        yield start


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[StartCluster]:
    """Start a cluster over TCP, or return the module's cluster with these settings, which runs already."""
    with starting_clusters() as start:
        yield start


@pytest.fixture
def own_cluster() -> Iterator[StartCluster]:
    """Start a cluster over TCP for one test."""
    with starting_clusters() as start:
        yield start


@pytest.fixture(scope="module")
def pair(shared_cluster: StartCluster) -> LocalCluster:
    """Two pservers and two trainers, with parameters that are cut."""
    return shared_cluster(min_block_size=100, on_trainer_loss="fail")


@pytest.fixture(scope="module")
def alone(shared_cluster: StartCluster) -> LocalCluster:
    """Two pservers and one trainer, with parameters that are cut."""
    return shared_cluster(trainers=1, min_block_size=100, on_trainer_loss="fail")


@pytest.fixture(scope="module")
def ring(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(strategy="ring")


@pytest.fixture
def session(alone: LocalCluster) -> Iterator[Session]:
    with Session(coordinator=alone.address, rank=0, world_size=1) as session:
        yield session
