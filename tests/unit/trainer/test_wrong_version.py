"""Somebody between, or behind the address, who does not speak HTTP/2."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from ps_config.certificates import TlsFiles
from trainer_client.transport.exchange import make_bulk_client


@pytest.mark.asyncio
async def test_it_says_that_the_other_end_speaks_http1() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with make_bulk_client(TlsFiles(), None, http2=True) as client:
            with pytest.raises(httpx.TransportError, match=r"it speaks HTTP/1\.1"):
                await client.post(f"http://{host}:{port}/", content=b"x")
