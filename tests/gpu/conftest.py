"""All tests here need a GPU; they skip, and say so, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer_client.testing import LocalCluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use (CUDA)")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.gpu)
            item.add_marker(no_gpu)


@pytest.fixture(scope="session", autouse=True)
def exact() -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        pservers=2, trainers=2, lease_seconds=5, on_trainer_loss="fail", nonfinite="skip_round"
    ) as cluster:
        yield cluster
