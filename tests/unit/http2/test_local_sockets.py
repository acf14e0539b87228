from __future__ import annotations

import os
import socket
import sys

import pytest
from pydantic import TypeAdapter

from ps_http2.local_sockets import bind_locally, connect_locally, enlarge_buffer, local_name
from ps_protocol.fields import LocalName

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")


def test_who_knows_the_name_is_connected(local: socket.socket) -> None:
    name = local_name(local)
    assert TypeAdapter(LocalName).validate_python(name) == name
    local.listen()
    with connect_locally(name) as client, local.accept()[0] as server:
        client.sendall(b"hello")
        assert server.recv(5) == b"hello"
        with socket.socket(socket.AF_UNIX) as plain:
            enlarge_buffer(plain)
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == plain.getsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF
            )


def test_every_socket_has_a_name_of_its_own(local: socket.socket) -> None:
    other = bind_locally()
    assert other is not None
    with other:
        assert local_name(other) != local_name(local)


def test_a_name_goes_with_its_socket(local: socket.socket) -> None:
    local.listen()
    name = local_name(local)
    local.close()
    with pytest.raises(ConnectionRefusedError):
        connect_locally(name)


def test_a_process_of_another_user_is_not_spoken_to(local: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    local.listen()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user"):
        connect_locally(local_name(local))
    with local.accept()[0] as server:
        assert server.recv(1) == b""  # nothing was said, and it is closed


def test_a_listener_that_accepts_nobody_is_not_waited_for(local: socket.socket) -> None:
    local.listen(0)
    with connect_locally(local_name(local)), pytest.raises(BlockingIOError):
        connect_locally(local_name(local))


def test_elsewhere_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Address family not supported by protocol")

    with monkeypatch.context() as sandbox:
        sandbox.setattr(socket, "socket", refuse)
        assert bind_locally() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert bind_locally() is None
    with pytest.raises(OSError, match="Linux"):
        connect_locally("gradpost-" + 32 * "0")


@pytest.mark.parametrize("what", ["__init__", "bind"])
def test_where_there_can_be_none_there_is_none(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("the sandbox does not like it")

    monkeypatch.setattr(socket.socket, what, refuse, raising=False)
    assert bind_locally() is None
