"""Access control: host names, origins and bearer tokens, checked on a request's headers.

The gate looks up once which scope of tokens a request needs. A new route goes into the table: a test compares it with
the routes of both applications. Any other request, also with a path that does not exist, needs `admin`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI
from starlette.types import Scope

from ps_config.control_client import make_control_client
from ps_config.hosts import LOOPBACK_NAMES, is_ip_literal, is_loopback, split_port
from ps_config.tokens import Scope as TokenScope
from ps_config.tokens import TokenFolder, TokenPair, includes, parse_authorization
from ps_protocol import routes
from ps_protocol.errors import BadInput, Forbidden, Unauthenticated

from .logs import get_logger
from .settings import ServiceSettings

OPENAPI = "/openapi.json"
DASHBOARD = "/"
DASHBOARD_FILE = "/dashboard/{name}"
PROBES = frozenset({("GET", routes.HEALTH), ("GET", routes.READY)})

# None: no token is needed, as for probes.
ROUTE_SCOPES: Mapping[tuple[str, str], TokenScope | None] = {
    ("GET", routes.HEALTH): None,
    ("GET", routes.READY): None,
    # a page without data, which asks for a token
    ("GET", DASHBOARD): None,
    ("GET", DASHBOARD_FILE): None,
    # reading
    ("GET", routes.METRICS): "read",
    ("GET", OPENAPI): "read",
    ("GET", routes.STATE): "read",
    ("GET", routes.SHARD): "read",
    ("GET", routes.BLOCK_STATISTICS): "read",
    ("GET", routes.STATUS): "read",
    ("GET", routes.SUMMARY): "read",
    ("GET", routes.PARAMETERS): "read",
    ("GET", routes.PARAMETER): "read",
    ("GET", routes.STATISTICS): "read",
    ("GET", routes.MODEL): "read",
    ("GET", routes.CURVES): "read",
    ("GET", routes.HISTORY): "read",
    ("GET", routes.HISTORY_RUN): "read",
    ("GET", routes.EVENTS): "read",
    ("GET", routes.CONTROLS): "read",
    ("GET", routes.TARGETS): "read",
    ("GET", routes.CHECKPOINTS): "read",
    # trainers
    ("POST", routes.SEND): "train",
    ("POST", routes.GET): "train",
    ("POST", routes.SLOTS): "train",
    ("POST", routes.NORM): "train",
    ("POST", routes.BARRIER): "train",
    ("POST", routes.INITIAL): "train",
    ("GET", routes.BUFFERS): "train",
    ("POST", routes.JOIN_TRAINER): "train",
    ("POST", routes.DECLARE_MODEL): "train",
    ("GET", routes.PLAN): "train",
    ("POST", routes.TRAINER_HEARTBEAT): "train",
    ("POST", routes.LEAVE): "train",
    # services among each other
    ("GET", routes.UPDATES): "admin",
    ("GET", routes.SHARD_COPY): "admin",
    ("GET", routes.RUN): "admin",
    ("POST", routes.REPORT_STANDBY): "admin",
    ("POST", routes.REGISTER_PSERVER): "admin",
    ("POST", routes.PSERVER_HEARTBEAT): "admin",
    ("POST", routes.PSERVER_ENDED): "admin",
    ("PUT", routes.RUN): "admin",
    ("PUT", routes.MEMBERS): "admin",
    ("PUT", routes.FREEZE): "admin",
    ("GET", routes.RESTORABLE): "admin",
    ("PUT", routes.WANT_CHECKPOINT): "admin",
    ("PUT", routes.FENCE_STANDBY): "admin",
    ("PUT", routes.PROMOTE_STANDBY): "admin",
    # administrators
    ("POST", routes.CHECKPOINTS): "admin",
    ("POST", routes.PAUSE): "admin",
    ("POST", routes.RESUME): "admin",
    ("PUT", routes.RATE): "admin",
    ("PUT", routes.FROZEN): "admin",
    ("DELETE", routes.FROZEN): "admin",
    ("POST", routes.EVICT): "admin",
    ("POST", routes.STOP): "admin",
    ("POST", routes.ROLL_BACK): "admin",
}


log = get_logger()

TOKEN_WAIT_SECONDS = 60.0  # until the token is written: services and trainers may be started in any order
TOKEN_KEY = "gradpost.token"  # in a request's scope
_DEFAULT_PORTS = {"http": "80", "https": "443"}


async def wait_for_token(settings: ServiceSettings, stop: asyncio.Event) -> bool:
    """Wait until the token file of the settings exists, and log that once; return False if `stop` was set before.

    Raises SettingsError after `TOKEN_WAIT_SECONDS`.
    """
    if settings.sent_token is not None:
        for seconds in TokenPair(settings.sent_token).wait_for_token(TOKEN_WAIT_SECONDS, log.info):
            if stop.is_set():
                return False
            await asyncio.sleep(seconds)
    return True


def make_peer_client(settings: ServiceSettings) -> httpx.AsyncClient:
    """Return a client for the other services, which trusts `tls_ca` as well as the system's authorities."""
    tokens = None if settings.sent_token is None else TokenPair(settings.sent_token, log.warning)
    return make_control_client(settings.client_tls, tokens, with_system=True)


def protect(app: FastAPI, settings: ServiceSettings, address: str) -> None:
    """Give `app`, which is served under `address`, its limits and access control.

    Raises RuntimeError if the application has answered a request before.
    """
    if app.middleware_stack is not None:
        raise RuntimeError("access control must be added before the application answers its first request")
    names = [settings.host, *(urlsplit(url).hostname or "" for url in (address, settings.coordinator))]
    app.state.guard = Guard(
        KnownHosts([*names, *map(str.strip, (settings.allowed_hosts or "").split(","))]),
        None if settings.tokens_dir is None else TokenFolder(settings.tokens_dir, log.warning),
        settings.max_requests,
        settings.body_timeout_seconds,
    )


def warn_if_exposed(settings: ServiceSettings) -> None:
    """Log a warning if other hosts reach a service without tokens, or without encryption."""
    if not is_loopback(settings.host):
        if settings.tokens_dir is None:
            log.warning("insecure: every client that reaches this port may do everything", host=settings.host)
        elif settings.tls_cert is None:
            log.warning("tokens travel unencrypted: set tls_cert and tls_key, or use a private network")


class KnownHosts:
    """The host names of a service, against DNS rebinding.

    A web page can point its own name at 127.0.0.1 or an internal address, and then read and change what a browser
    reaches there; but its requests carry that name. Addresses and loopback names cannot be rebound.
    """

    def __init__(self, names: Iterable[str]) -> None:
        names = {name.lower().rstrip(".") for name in names if name}
        self._any = "*" in names
        self._exact = names | LOOPBACK_NAMES
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))

    def __contains__(self, host: str) -> bool:
        return is_ip_literal(host) or self.lists(host)

    def lists(self, host: str) -> bool:
        """Return True if the host is one of the configured names; an address must be listed, too."""
        return self._any or host in self._exact or host.endswith(self._suffixes)


@dataclass
class Guard:
    """Access control and limits of an application, which accepts every host and needs no token by default."""

    hosts: KnownHosts = field(default_factory=lambda: KnownHosts(["*"]))
    tokens: TokenFolder | None = None
    max_requests: int = 2048
    body_timeout_seconds: float = 30.0
    _good_authorities: set[bytes] = field(default_factory=set)

    def check(self, scope: Scope, needed: TokenScope | None, *, is_probe: bool) -> None:
        """Check the headers of a request, whose token needs the scope `needed`.

        Raises Unauthenticated, Forbidden and BadInput.
        """
        host: bytes | None = None
        origin = authorization = b""
        for name, value in scope["headers"]:
            if name == b"host":  # of which both versions of HTTP accept one
                host = value
            elif name == b"authorization":
                authorization = value
            elif name == b"origin":
                origin = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise BadInput(
                    "the body of a request must be uncompressed",
                    code="unsupported_content_coding", actual=_quote(value),
                )  # fmt: skip
        # Load balancers probe without a Host header; browsers always send one.
        if host is None and not is_probe:
            host = b""
        if host is not None and host not in self._good_authorities:
            self._check_host(host.decode("latin-1"))
            if len(self._good_authorities) < 100:  # a service has few; an address may be written in many ways
                self._good_authorities.add(host)
        if origin and scope["method"] != "GET":
            _check_origin(origin.decode("latin-1"), (host or b"").decode("latin-1"))
        if self.tokens is not None and needed is not None:
            self._check_token(self.tokens, scope, needed, authorization.decode("latin-1"))

    def _check_host(self, authority: str) -> None:
        if split_port(authority)[0] not in self.hosts:
            raise BadInput(
                "the service does not accept this host name; add it to GRADPOST_ALLOWED_HOSTS, or set "
                "GRADPOST_ADVERTISE_ADDRESS",
                code="bad_host",
                actual=authority[:300],
            )

    def _check_token(self, tokens: TokenFolder, scope: Scope, needed: TokenScope, authorization: str) -> None:
        token = parse_authorization(authorization)
        if not token:
            raise Unauthenticated(
                f"the request requires a bearer token of scope {needed}; set GRADPOST_TOKEN_FILE for the client",
                needed=needed,
            )
        given = tokens.scope_of(token)
        scope[TOKEN_KEY] = token
        if given is None:
            raise Unauthenticated("the bearer token is not valid for this service", needed=needed)
        if not includes(given, needed):
            raise Forbidden(f"the request requires a token of scope {needed}, not {given}", needed=needed, given=given)


def _quote(value: bytes) -> str:
    return value[:300].decode("latin-1")


def name_token(scope: Scope) -> str:
    """Return a name for the token of a request: the beginning of its digest, which does not reveal the token."""
    token = scope.get(TOKEN_KEY)
    return "no token" if token is None else f"token {hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _check_origin(origin: str, authority: str) -> None:
    try:
        url = urlsplit(origin)
    except ValueError:
        raise BadInput("the origin must be a URL", code="bad_origin", expected=authority, actual=origin[:300]) from None
    default = _DEFAULT_PORTS.get(url.scheme, "")
    # Only the port of the scheme counts: a proxy may terminate TLS.
    theirs, ours = split_port(url.netloc), split_port(authority)
    if theirs[0] != ours[0] or not theirs[0] or (theirs[1] or default) != (ours[1] or default):
        text = "a page of another site sent the request"
        raise BadInput(text, code="bad_origin", expected=authority, actual=origin[:300])
