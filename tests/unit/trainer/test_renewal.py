"""A trainer's own certificate, and whom it trusts, are read again when they change; tensors' connections included."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trustme

from ps_config.certificates import TlsFiles
from ps_config.control_client import make_control_client
from ps_http2.client import BODY_EXTENSION
from ps_protocol.errors import Unreachable
from services.runtime import server as server_module
from trainer_client.membership import Membership
from trainer_client.settings import read_settings
from trainer_client.transport.exchange import make_bulk_client

from ..protocol.test_certificates import Authority
from ..runtime.support import Running, Sample, running

BODY = {BODY_EXTENSION: (memoryview(b"12345"),)}


def serve(authority: Authority) -> AbstractAsyncContextManager[Running]:
    files = authority.issue("service")
    return running(Sample().make_app(), tls_client_ca=files.ca, tls_cert=files.cert, tls_key=files.key)


@pytest.mark.asyncio
@pytest.mark.parametrize("http2", [True, False])
async def test_the_whole_authority_is_replaced(http2: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_http2.client.PING_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "GRACE_SECONDS", 0.2)  # idle clients do not say goodbye when the server stops
    authority = Authority(tmp_path / "authority")
    client = authority.issue("client")
    async with (
        make_control_client(client, None) as control,
        make_bulk_client(client, None, http2=http2) as bulk,
    ):
        async with serve(authority) as service:
            url = f"{service.address}/raw/fine"
            assert (await bulk.post(url, extensions=BODY)).text == f"5 HTTP/{'2' if http2 else '1.1'}\n"
            assert (await control.post(url, content=b"12345")).text == "5 HTTP/1.1\n"
            authority.issue("client", only_cert=True)  # its key is not there yet
            await asyncio.sleep(0.1)
            assert (await bulk.post(url, extensions=BODY)).status_code == 200
        authority.authority = trustme.CA()
        authority.__post_init__()
        authority.issue("client")
        async with serve(authority) as service:
            url = f"{service.address}/raw/fine"
            assert (await bulk.post(url, extensions=BODY)).status_code == 200
            assert (await control.post(url, content=b"12345")).status_code == 200


@pytest.mark.asyncio
async def test_a_coordinator_whose_certificate_is_not_trusted_is_given_up_at_once(tmp_path: Path) -> None:
    issued, other = Authority(tmp_path / "authority").issue("service"), Authority(tmp_path / "other")
    async with (
        running(Sample().make_app(), tls_cert=issued.cert, tls_key=issued.key) as service,
        make_control_client(TlsFiles(other.ca), None) as control,
        asyncio.timeout(30),
    ):
        membership = Membership(read_settings(coordinator=service.address, retry_seconds=600), control)
        with pytest.raises(Unreachable, match=r"is not trusted .*unable to get local issuer.* set GRADPOST_TLS_CA"):
            await membership.join(None)
