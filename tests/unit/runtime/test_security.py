"""Access to a service over real sockets: tokens, hosts, origins, and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ps_config.certificates import TlsFiles, client_context
from ps_config.control_client import make_control_client
from ps_config.environment import SettingsError
from ps_config.tokens import SCOPES
from services.runtime import security
from services.runtime.logs import configure_logs
from services.runtime.security import make_peer_client
from services.runtime.settings import ServiceSettings

from ..protocol.test_access import Authority, put, serial
from .support import Running, Sample, ask_raw, http2_client, running, trainer_client

TOKENS = {scope: f"token-of-{scope}-xxxxxxxx" for scope in SCOPES}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def tokens_dir(tmp_path: Path) -> Path:
    for scope, token in TOKENS.items():
        put(tmp_path / scope, token)
    return tmp_path


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


async def refusal(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["code"]


# ---------------------------------------------------------------------- tokens


async def test_who_may_do_what(tokens_dir: Path) -> None:
    app = Sample().make_app()
    async with running(app, tokens_dir=tokens_dir) as service, httpx.AsyncClient() as http:

        async def status(method: str, path: str, scope: str | None) -> int:
            headers = bearer(TOKENS[scope]) if scope else {}
            return (await http.request(method, service.address + path, headers=headers)).status_code

        callers = (None, *SCOPES)
        assert [await status("GET", "/healthz", caller) for caller in callers] == [200, 200, 200, 200]
        assert [await status("GET", "/metrics", caller) for caller in callers] == [401, 200, 200, 200]
        assert [await status("HEAD", "/metrics", caller) for caller in callers] == [401, 200, 200, 200]
        # Not in the table, so that they need admin whatever they do.
        for method, path in (("GET", "/stale"), ("POST", "/raw/fine"), ("GET", "/nowhere"), ("POST", "/metrics")):
            answers = [await status(method, path, caller) for caller in callers]
            assert answers[:3] == [401, 403, 403], path
            assert answers[3] not in (401, 403), path


async def test_what_a_refusal_says(
    tokens_dir: Path, capsys: pytest.CaptureFixture[str], http: httpx.AsyncClient
) -> None:
    configure_logs("sample", "json")
    async with running(Sample().make_app(), tokens_dir=tokens_dir) as service:
        url = f"{service.address}/raw/fine"
        for headers in ({}, bearer("x" * 30), {"authorization": f"Basic {TOKENS['admin']}"}):
            response = await http.post(url, headers=headers)
            assert await refusal(response) == (401, "unauthenticated")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["needed"] == "admin"
        response = await http.post(url, headers=bearer(TOKENS["train"]))
        assert await refusal(response) == (403, "forbidden")
        assert (response.json()["needed"], response.json()["given"]) == ("admin", "train")
        # Nor is a token taken from where it would be logged.
        assert (await http.get(f"{service.address}/metrics?token={TOKENS['admin']}")).status_code == 401
    logged = "".join(capsys.readouterr())
    assert "serving" in logged
    assert "token-of-" not in logged


async def test_a_caller_falls_back_to_the_token_before(tokens_dir: Path, tmp_path: Path) -> None:
    """So that folders may be updated in any order."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    put(theirs / "admin", "n" * 30)
    put(theirs / "admin.previous", TOKENS["admin"])
    settings = ServiceSettings(tokens_dir=theirs)
    async with (
        running(Sample().make_app(), tokens_dir=tokens_dir) as service,
        make_peer_client(settings) as peer,
    ):
        assert (await peer.post(f"{service.address}/raw/fine", content=b"12345")).text.startswith("5 ")
        (theirs / "admin.previous").unlink()
        assert (await peer.post(f"{service.address}/raw/fine", content=b"12345")).status_code == 401


async def test_the_tokens_may_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(security.log, "info", lambda line, **_: lines.put_nowait(line))

    async def begin() -> Running:
        async with running(Sample().make_app(), tokens_dir=tmp_path / "later") as service:
            return service

    serving = asyncio.create_task(begin())
    assert (await lines.get()).startswith("waiting for a token, 60 s at most: there is no token file")
    assert not serving.done()
    (tmp_path / "later").mkdir()
    put(tmp_path / "later" / "admin", TOKENS["admin"])
    await serving


async def test_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "TOKEN_WAIT_SECONDS", 0.0)
    with pytest.raises(SettingsError, match="there is no token file"):
        async with running(Sample().make_app(), tokens_dir=tmp_path):
            pass


# ---------------------------------------------------------------------- hosts and origins


async def test_hosts_that_the_service_goes_by(http: httpx.AsyncClient) -> None:
    settings = {
        "advertise_address": "http://PS-0.example:7071",
        "coordinator": "http://coordinator:7070",
        "allowed_hosts": "proxy.example, *.inner",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with running(Sample().make_app(), port=port, **settings):
        url = f"http://127.0.0.1:{port}/healthz"
        for host in (
            f"127.0.0.1:{port}", f"localhost:{port}", "10.1.2.3", "[::1]:80", "ps-0.example", "PS-0.EXAMPLE:1",
            "coordinator:7070", "proxy.example", "a.b.inner",
        ):  # fmt: skip
            assert (await http.get(url, headers={"host": host})).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "inner", "evilinner", ""):
            response = await http.get(url, headers={"host": host})
            assert response.status_code in (400, 421), host  # a server refuses none at all by itself
            if host:
                assert await refusal(response) == (421, "bad_host")
        async with http2_client() as http2:
            assert (await http2.get(url)).status_code == 200
            response = await http2.get(url, headers={"host": "evil.example"})
            assert await refusal(response) == (421, "bad_host")


@pytest.mark.parametrize(
    ("request_head", "answers"),
    [
        (b"GET /healthz HTTP/1.0", [b"HTTP/1.1 200 ", b'{"status":"ok"}']),
        (b"GET /readyz HTTP/1.0", [b"HTTP/1.1 200 "]),
        (b"HEAD /readyz HTTP/1.0", [b"HTTP/1.1 200 ", b"\r\n\r\n"]),
        (b"OPTIONS /healthz HTTP/1.0", [b"HTTP/1.1 421 "]),
        (b"GET / HTTP/1.0", [b"HTTP/1.1 421 "]),
        (b"GET /stale HTTP/1.0", [b"HTTP/1.1 421 "]),
        (b"GET /stale HTTP/1.1", [b"HTTP/1.1 400 "]),
        (b"GET /stale HTTP/1.1\r\nHost: localhost\r\nHost: localhost", [b"HTTP/1.1 400 "]),
    ],
)
async def test_only_the_probes_of_load_balancers_need_no_host(request_head: bytes, answers: list[bytes]) -> None:
    async with running(Sample().make_app()) as service:
        answer = await ask_raw(service.address, request_head + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(answers[0])
    assert not answers[1:] or answer.endswith(answers[-1])
    assert all(part in answer for part in answers)


REFUSALS: dict[str, tuple[dict[str, str], int, str]] = {
    "no token": ({}, 401, "unauthenticated"),
    "an unknown token": (bearer("x" * 20), 401, "unauthenticated"),
    "a token of a lower scope": (bearer(TOKENS["train"]), 403, "forbidden"),
    "another host": ({**bearer(TOKENS["admin"]), "host": "evil.example"}, 421, "bad_host"),
    "a page of another site": ({**bearer(TOKENS["admin"]), "origin": "http://evil.example"}, 403, "bad_origin"),
    "an encoded body": ({**bearer(TOKENS["admin"]), "content-encoding": "gzip"}, 415, "unsupported_content_coding"),
}


@pytest.mark.parametrize(
    ("make_client", "refused"),
    [
        *((client, name) for client in (httpx.AsyncClient, http2_client) for name in REFUSALS),
        *((trainer_client, name) for name in REFUSALS if name != "another host"),  # which it cannot name
    ],
)
async def test_raw_routes_refuse_what_others_refuse(make_client: Any, refused: str, tokens_dir: Path) -> None:
    """They do so although they are called beside the router."""
    headers, status, code = REFUSALS[refused]
    sample = Sample()
    async with running(sample.make_app(), tokens_dir=tokens_dir) as service, make_client() as client:
        for path in ("/raw/fine", "/greet/a"):
            answer = await client.post(service.address + path, headers=headers, content=b"{}")
            assert (await refusal(answer), answer.json()["instance"]) == ((status, code), path)
        for route in ("/raw/fine", "/greet/{name:path}", "unmatched"):
            labels = {"route": route, "method": "POST", "code": "2xx"}
            assert not sample.metrics.registry.get_sample_value("gradpost_http_requests_total", labels)


@pytest.mark.parametrize("make_client", [httpx.AsyncClient, http2_client])
async def test_head_is_answered_wherever_get_is(make_client: Any, tokens_dir: Path) -> None:
    async with running(Sample().make_app(), tokens_dir=tokens_dir) as service, make_client() as client:
        for path in ("/openapi.json", "/metrics", "/healthz"):
            head = await client.head(service.address + path, headers=bearer(TOKENS["read"]))
            assert (head.status_code, head.content) == (200, b""), path
        assert (await client.head(f"{service.address}/metrics")).status_code == 401
        assert (await client.head(f"{service.address}/healthz")).status_code == 200


async def test_pages_of_other_sites_change_nothing(http: httpx.AsyncClient) -> None:
    async with running(Sample().make_app()) as service:
        url = f"{service.address}/raw/fine"
        own = service.address
        for origin in (
            "http://evil.example",
            "null",
            "http://127.0.0.1:1",
            own + ".evil.example",
            "http://",
            "x",
            "http://[",
        ):
            response = await http.post(url, headers={"origin": origin})
            assert await refusal(response) == (403, "bad_origin"), origin
            assert (await http.get(f"{own}/healthz", headers={"origin": origin})).status_code == 200
        for headers in ({}, {"origin": own}):
            assert (await http.post(url, headers=headers)).status_code == 200
        # The default port need not be written out.
        assert (await http.post(url, headers={"host": "localhost", "origin": "http://localhost:80"})).status_code == 200


# ---------------------------------------------------------------------- listening


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_client_cert": "a.pem"}, "tls_client_cert and tls_client_key go together"),
        ({"tls_client_ca": "a.pem"}, "tls_client_ca needs tls_cert"),
        ({"host": "0.0.0.0"}, "gradpost token create"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ServiceSettings(**settings)
    ServiceSettings(host="0.0.0.0", tokens_dir=tmp_path)


# ---------------------------------------------------------------------- TLS


def serving(files: TlsFiles) -> dict[str, Path | None]:
    return {"tls_client_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}


async def serial_of(address: str, files: TlsFiles) -> int:
    """The certificate that a new connection gets to see."""
    host, port = address.removeprefix("https://").split(":")
    context = client_context(files)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    with contextlib.suppress(ConnectionError):  # what ends it is not asked here
        await reader.read()
    return int(certificate["serialNumber"], 16)


async def test_callers_must_show_a_certificate(authority: Authority, tmp_path: Path) -> None:
    client = authority.issue("client")
    stranger = Authority(tmp_path / "other").issue("client")
    async with running(Sample().make_app(), **serving(authority.issue("service"))) as service:
        settings = ServiceSettings(tls_ca=client.ca, tls_client_cert=client.cert, tls_client_key=client.key)
        async with make_peer_client(settings) as peer:
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
        for cert, key in ((None, None), (stranger.cert, stranger.key)):
            refused = ServiceSettings(tls_ca=client.ca, tls_client_cert=cert, tls_client_key=key)
            for http in (make_peer_client(refused), make_control_client(TlsFiles(client.ca, cert, key), None)):
                async with http:
                    with pytest.raises(httpx.TransportError):  # what both of them try again for, and say
                        await http.get(f"{service.address}/healthz")


async def test_a_new_certificate_interrupts_nothing(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    client = authority.issue("client")
    files = authority.issue("service")
    assert files.cert
    sample = Sample()
    async with (
        running(sample.make_app(), **serving(files)) as service,
        httpx.AsyncClient(verify=client_context(client)) as http,
        asyncio.timeout(30),
    ):
        assert await serial_of(service.address, client) == serial(files.cert)
        slow = asyncio.create_task(http.get(f"{service.address}/slow"))
        await sample.slow_begun.wait()
        authority.issue("service", only_cert=True)  # its key is not there yet
        first = await serial_of(service.address, client)
        authority.issue("service")
        assert first != serial(files.cert)
        assert await serial_of(service.address, client) == serial(files.cert)
        assert (await http.get(f"{service.address}/healthz")).status_code == 200
        sample.slow_ends.set()
        assert (await slow).json() == "slow"  # it began with the old one


@pytest.mark.parametrize(
    "limits",
    [{"header_timeout_seconds": 1}, {"max_connections": 3}],
    ids=["for longer than it may take", "while there are too many"],
)
async def test_a_handshake_that_does_not_end_is_cut_off(limits: dict[str, float], authority: Authority) -> None:
    files = authority.issue("service")
    async with running(Sample().make_app(), **limits, **serving(files)) as service, asyncio.timeout(10):
        host, port = service.address.removeprefix("https://").split(":")
        settings = ServiceSettings(tls_ca=files.ca, tls_client_cert=files.cert, tls_client_key=files.key)
        async with make_peer_client(settings) as peer, make_peer_client(settings) as other:
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
            begun = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
            for _, writer in begun:
                writer.write(bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(80))  # of 512 that it announces
            # With too many connections the oldest handshakes go first, and the one of `other` is completed.
            assert (await other.get(f"{service.address}/healthz")).status_code == 200
            for reader, writer in begun[: None if "header_timeout_seconds" in limits else 4]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            # A connection with a request stays.
            assert (await peer.get(f"{service.address}/healthz")).status_code == 200
            for _, writer in begun:
                writer.close()


async def test_a_connection_that_speaks_plain_http_is_closed_soon(authority: Authority) -> None:
    async with running(Sample().make_app(), **serving(authority.issue("service"))) as service, asyncio.timeout(10):
        host, port = service.address.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await reader.read() == b""  # OpenSSL sends no alert for plain HTTP
        writer.close()


# ---------------------------------------------------------------------- the probe of a kubelet


ROOT = Path(__file__).parents[3]


async def probe(url: str, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code and what it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "services.runtime.probe", url),
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_a_probe_shows_the_certificate_of_the_environment(authority: Authority) -> None:
    files = authority.issue("service")
    names = {"CA": files.ca, "CLIENT_CERT": files.cert, "CLIENT_KEY": files.key}
    environ = {f"GRADPOST_TLS_{name}": str(path) for name, path in names.items()}
    sample = Sample()
    async with running(sample.make_app(), **serving(files)) as service:
        url = f"https://localhost:{service.address.rpartition(':')[2]}/readyz"
        assert await probe(url, environ) == (0, "")
        code, said = await probe(url, {"GRADPOST_TLS_CA": environ["GRADPOST_TLS_CA"]})
        assert code == 1, said  # no certificate
        sample.missing = "reader"
        assert await probe(url, environ) == (1, f"{url}: HTTP Error 503: Service Unavailable\n")
    code, said = await probe(url, environ)
    assert (code, "refused" in said) == (1, True)
