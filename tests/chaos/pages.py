"""A gateway that answers in place of a service: a page of HTML for each request, over HTTP/1.1 or HTTP/2."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived
from h2.exceptions import ProtocolError

PREFACE = b"PRI * HTTP/2.0"
READ_BYTES = 64 * 1024


async def answer_pages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int) -> None:
    """Answer the requests of one connection until it ends; over HTTP/1.1 it is closed after the first."""
    phrase = HTTPStatus(status).phrase
    page = f"<html><head><title>{status} {phrase}</title></head><body><h1>{phrase}</h1></body></html>".encode()
    data = await reader.read(READ_BYTES)
    if not data.startswith(PREFACE):
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/html\r\ncontent-length: {len(page)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode() + page)
        await writer.drain()
        while data:  # closing with unread bytes resets the connection, and the page may be lost
            data = await reader.read(READ_BYTES)
        return
    connection = H2Connection(H2Configuration(client_side=False))
    connection.initiate_connection()
    while data:
        try:
            events = connection.receive_data(data)
        except ProtocolError:
            return
        for event in events:
            if isinstance(event, RequestReceived):
                headers = [(":status", str(status)), ("content-type", "text/html"), ("content-length", str(len(page)))]
                connection.send_headers(event.stream_id, headers)
                connection.send_data(event.stream_id, page, end_stream=True)
            elif isinstance(event, DataReceived):
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        writer.write(connection.data_to_send())
        await writer.drain()
        data = await reader.read(READ_BYTES)
