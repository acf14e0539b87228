"""Services behind a gateway that answers pages of its own while they are away: scripts go on as without one."""

from __future__ import annotations

import socket

import pytest

from .faulty_run import FaultyRun, expected_result
from .gateway import serve_gateway

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize("status", [404, pytest.param(500, marks=pytest.mark.extended)])
def test_training_goes_on_while_a_gateway_answers_for_the_coordinator(status: int) -> None:
    with serve_gateway(status) as gateway, FaultyRun(80, environment={"GRADPOST_COORDINATOR": gateway.address}) as run:
        gateway.target = run.cluster.address
        run.wait_for_round(10)
        run.kill(run.cluster.coordinator)
        gateway.wait_for_pages(5)
        run.cluster.restart_coordinator()
        assert run.results() == [expected_result(80)] * 2
        assert f"answered {status} without a problem document" in run.wait_for_line("did not answer a heartbeat")


@pytest.mark.extended
def test_a_pserver_is_waited_for_while_a_gateway_answers_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with serve_gateway(404) as gateway:
        gateway.target = f"http://127.0.0.1:{port}"
        own = {"GRADPOST_PORT": str(port), "GRADPOST_ADVERTISE_ADDRESS": gateway.address}
        with FaultyRun(80, http2=False, environment={"GRADPOST_LOCAL_TRANSPORT": "false"}) as run:
            run.wait_for_round(10)
            run.kill(run.cluster.pservers[1])
            run.cluster.start_pserver(1, **own)  # from now on it is reached through the gateway
            run.wait_for_round(run.round_of(0) + 10)
            run.kill(run.cluster.pservers[1])
            gateway.wait_for_pages(5)
            run.cluster.start_pserver(1, **own)
            assert run.results() == [expected_result(80)] * 2
