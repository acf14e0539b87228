"""Tensors over HTTP/1.1, where HTTP/2 is switched off: the same bits, and a pserver that dies and comes back."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from trainer_client import Session
from trainer_client.testing import LocalCluster

from .faulty_run import FaultyRun, expected_result
from .parity_model import assert_identical, run_trainers, train_remotely

pytestmark = pytest.mark.cluster


def train(session: Session) -> tuple[dict[str, Tensor], str]:
    return train_remotely("AdamW", session, contributor=session.rank), session.summary().transport


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"max_delay": 1}, marks=pytest.mark.soak),
        pytest.param({"push_type": "int8", "pull_type": "int8"}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_a_run_gives_the_bits_of_a_run_over_http2(settings: dict[str, Any]) -> None:
    results = []
    for http2 in (True, False):
        with LocalCluster(pservers=2, trainers=2, http2=http2, local_transport=False, **settings) as cluster:
            results += run_trainers(cluster.address, [train, train])
    assert [transport for _, transport in results] == ["HTTP/2"] * 2 + ["HTTP/1.1"] * 2
    for parameters, _ in results[1:]:
        assert_identical(parameters, results[0][0])


@pytest.mark.extended
def test_a_pserver_dies_and_comes_back() -> None:
    with FaultyRun(60, http2=False) as run:
        run.wait_for_round(10)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        assert run.results() == [expected_result(60)] * 2
