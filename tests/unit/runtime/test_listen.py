from __future__ import annotations

import socket

import pytest

from services.runtime.listen import ListenError, advertised_address, take_port
from services.runtime.settings import ServiceSettings


def test_free_port_is_reported_and_taken() -> None:
    with take_port("127.0.0.1", 0) as bound:
        host, port = bound.getsockname()
        assert (host, port > 0) == ("127.0.0.1", True)
        assert bound.proto == socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY on nothing else


@pytest.mark.parametrize("other_shares", [True, False])
def test_port_on_which_another_socket_listens(other_shares: bool) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, other_shares)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}: another process listens there.*GRADPOST_PORT"):
            take_port("127.0.0.1", port)


def test_port_of_an_earlier_life_whose_connections_linger() -> None:
    """A connection that the server closed first stays in TIME_WAIT for a minute, without anybody listening."""
    with socket.socket() as earlier:
        earlier.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        earlier.bind(("127.0.0.1", 0))
        earlier.listen()
        port = earlier.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            earlier.accept()[0].close()
            assert client.recv(1) == b""
    take_port("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {host}:0: .*GRADPOST_HOST"):
        take_port(host, 0)


def test_advertised_address_is_the_one_that_was_set() -> None:
    settings = ServiceSettings(host="0.0.0.0", insecure=True, advertise_address="https://ps.example/0/")
    assert advertised_address(settings, 7071) == "https://ps.example/0"


def test_advertised_address_of_one_interface() -> None:
    assert advertised_address(ServiceSettings(host="10.0.0.5", insecure=True), 7071) == "http://10.0.0.5:7071"
    assert advertised_address(ServiceSettings(host="::1"), 7071) == "http://[::1]:7071"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_advertised_address_of_every_interface_is_none_of_them(host: str) -> None:
    address = advertised_address(ServiceSettings(host=host, insecure=True), 7071)
    assert address.startswith("http://")
    assert address.endswith(":7071")
    assert host not in address
    assert "127.0.0.1" not in address


def test_advertised_address_without_a_network_is_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoNetwork(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "socket", NoNetwork)
    expected = f"http://{socket.gethostname()}:7071"
    assert advertised_address(ServiceSettings(host="0.0.0.0", insecure=True), 7071) == expected
