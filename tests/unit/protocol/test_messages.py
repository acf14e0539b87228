from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from ps_protocol.membership import Controls, InstallMembers, Membership
from ps_protocol.messages import DeclareModel, JoinTrainer, PserverInfo, RegisterPserver, RunSummary, TrainerHeartbeat


def test_a_loss_that_is_not_a_number_survives_the_wire() -> None:
    """Or the heartbeat of a diverging run would be refused, and its trainer counted as lost."""
    sent = TrainerHeartbeat(run="r", incarnation=1, round=3, results={"loss": math.nan, "norm": math.inf, "lr": 0.5})
    received = TrainerHeartbeat.model_validate_json(sent.model_dump_json())
    assert math.isnan(received.results["loss"])
    assert received.results["norm"] == math.inf
    assert received.results["lr"] == 0.5


def test_an_unknown_member_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        TrainerHeartbeat.model_validate({"run": "r", "incarnation": 1, "round": 3, "result": {}})


def test_a_membership_is_flat_in_json() -> None:
    membership = Membership({0: 2}, {0: 5}, {5: (0, 1)}, {5: (1,)}, (Controls(since=5, rates={0: 0.5}),))
    message = InstallMembers(run="r", number=3, membership=membership)
    assert message.model_dump(mode="json", exclude_defaults=True) == {
        "run": "r", "number": 3, "members": {"0": 2}, "starts": {"0": 5}, "sets": {"5": [0, 1]},
        "verdicts": {"5": [1]}, "controls": [{"since": 5, "rates": {"0": 0.5}}],
    }  # fmt: skip
    assert InstallMembers.model_validate_json(message.model_dump_json()) == message
    schema = InstallMembers.model_json_schema()
    assert schema["required"] == ["run", "number", "members"]
    assert schema["properties"].keys() == message.model_dump().keys()
    for wrong in ({}, {"membership": {"members": {}}}, {"members": {}, "start": {}}):
        with pytest.raises(ValidationError):
            InstallMembers.model_validate({"run": "r", "number": 3, **wrong})


def test_the_line_that_ends_a_training_script() -> None:
    summary = RunSummary(
        run="r",
        state="finished",
        mode="sync",
        transport="HTTP/2",
        num_trainers=2,
        rounds=120,
        seconds=8.13,
        shards=(),
        results={"loss": 0.06789, "accuracy": 0.98},
    )
    assert summary.line() == "trained: mode=sync transport=HTTP/2 accuracy=0.98 rounds=120 seconds=8.1"
    failed = summary.model_copy(update={"state": "failed", "results": {}})
    assert failed.line() == "failed: mode=sync transport=HTTP/2 rounds=120 seconds=8.1"


@pytest.mark.parametrize(
    "address",
    [
        "http://[",
        "http://",
        "ftp://a",
        "a:1",
        "http://a:x",
        "http://a:99999",
        "http://a/?b",
        "http://a b",
        "http://a:0",
    ],
)
def test_an_address_that_nobody_could_call_is_refused(address: str) -> None:
    with pytest.raises(ValidationError):
        JoinTrainer(protocol=1, instance="a process", metrics_address=address)
    with pytest.raises(ValidationError):
        RegisterPserver(protocol=1, instance="a process", address=address, http2=True)


@pytest.mark.parametrize("address", ["http://10.0.0.7/latest/meta-data", "http://10.0.0.7:80/a/", "http://me@a"])
def test_a_metrics_address_is_an_origin(address: str) -> None:
    with pytest.raises(ValidationError, match="a host and a port alone"):
        JoinTrainer(protocol=1, instance="a process", metrics_address=address)


@pytest.mark.parametrize("address", ["http://a", "https://[::1]:7071/prefix/", "http://10.0.0.7:80"])
def test_an_address_may_have_a_path(address: str) -> None:
    assert RegisterPserver(protocol=1, instance="a process", address=address, http2=True).address == address


@pytest.mark.parametrize(
    "name", ["", "gradpost-", "gradpost-" + 31 * "0", "gradpost-" + 32 * "0" + "\n", "/tmp/.X11-unix/X0", 41 * "0"]
)
def test_a_name_that_may_be_of_another_programs_socket_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        PserverInfo(index=0, address="http://a", incarnation=1, http2=True, local=name)
    with pytest.raises(ValidationError):
        RegisterPserver(protocol=1, instance="a process", address="http://a", http2=True, local=name)


def test_a_declaration_of_an_earlier_version_is_read_unless_it_averaged_buffers() -> None:
    earlier = {"run": "r", "incarnation": 1, "parameters": [], "optimizer": "SGD", "group_flags": []}
    assert DeclareModel.model_validate({**earlier, "average_buffers": 0}) == DeclareModel.model_validate(earlier)
    with pytest.raises(ValidationError, match="average_buffers is a setting of earlier versions"):
        DeclareModel.model_validate({**earlier, "average_buffers": 100})
