"""Host names and addresses: loopback, Host headers, and the hosts and ports that a service may listen on."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress
from typing import Any

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})


class ListenError(OSError):
    """The host and port cannot be bound; the message has the reason and a remedy."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a service that listens on `host`. Other names count as reachable.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "")]
    [True, True, True, False, False]
    """
    return host.lower() in LOOPBACK_NAMES or (is_ip_literal(host) and ipaddress.ip_address(host).is_loopback)


def is_ip_literal(host: str) -> bool:
    """Return whether the host is an address. A name could be pointed at any address by a DNS server."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def split_port(authority: str) -> tuple[str, str]:
    """Return the host, in lower case and without brackets, and the port of a Host header.

    >>> split_port("PS-0.example:7070"), split_port("[::1]:80"), split_port("10.0.0.5")
    (('ps-0.example', '7070'), ('::1', '80'), ('10.0.0.5', ''))
    """
    host, separator, port = authority.rpartition(":")
    if not separator or port.endswith("]"):
        host, port = authority, ""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host.lower().rstrip("."), port


def authority(host: str, port: int) -> str:
    """Return the part of a URL between `//` and the path.

    >>> authority("10.0.0.5", 80), authority("::1", 80)
    ('10.0.0.5:80', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable_host(host: str) -> str:
    """Return the host under which others reach a service that listens on `host`.

    For every interface it is the address from which this machine reaches other networks, or the name of the machine if
    it reaches none. Sends nothing.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    # Connecting a UDP socket only makes the kernel pick the route. The targets are the documentation's.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


def check_listening(host: str, *, has_tokens: bool, insecure: bool) -> None:
    """Raise ValueError if other machines can reach `host` and nothing protects the service."""
    if not (is_loopback(host) or has_tokens or insecure):
        raise ValueError(
            f"host {host or 'of every interface'} can be reached from elsewhere, and there are no tokens: create "
            "some with `gradpost token create --dir DIR` and set tokens_dir (--tokens-dir, GRADPOST_TOKENS_DIR), or "
            "set insecure (--insecure, GRADPOST_INSECURE=true) to accept all requests that reach the port"
        )


def take_port(host: str, port: int) -> socket.socket:
    """Bind `host` and `port` (0: a free one) for this process alone, without listening yet. Raises ListenError."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _bind(family, address)
    except OSError as error:  # gaierror included
        if error.errno == errno.EADDRINUSE:
            reason = (
                "another process listens there; stop it or choose another port (--port or GRADPOST_PORT, 0 for any)"
            )
        else:
            reason = f"{error.strerror}; choose another address (--host or GRADPOST_HOST, --port or GRADPOST_PORT)"
        raise ListenError(f"cannot listen on {authority(host, port)}: {reason}") from error


def _bind(family: int, address: Any) -> socket.socket:
    # asyncio disables Nagle's algorithm, which can delay a request by 40 ms, only if the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Ignores connections in TIME_WAIT of an earlier process, but no listening socket.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
