"""One cluster for all documents; it serves their runs one after another."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from trainer_client.testing import LocalCluster

NUM_PSERVERS = 2
NUM_TRAINERS = 2


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    # The long lease is for machines that are busy with something else.
    with LocalCluster(pservers=NUM_PSERVERS, trainers=NUM_TRAINERS, lease_seconds=30) as cluster:
        while len(cluster.status().pservers) < NUM_PSERVERS:  # so that no test pays for their start
            time.sleep(0.1)
        yield cluster
