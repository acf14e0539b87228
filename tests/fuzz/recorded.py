"""Recorded requests of trainers, and mutations: truncation, bit flips, repetition, other headers."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx
from hypothesis import strategies as st


@dataclass(frozen=True)
class Sent:
    """One request, as a client sent it."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    content: bytes

    def to_bytes(self) -> bytes:
        """On the wire, over HTTP/1.1."""
        url = urlsplit(self.url)
        path = f"{url.path}?{url.query}" if url.query else url.path
        lines = [f"{self.method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode() + self.content


class Recorder:
    """An event hook of an httpx client."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    async def __call__(self, request: httpx.Request) -> None:
        headers = tuple((name, value) for name, value in request.headers.items() if name != "accept-encoding")
        self.sent.append(Sent(request.method, str(request.url), headers, await request.aread()))


def flip_bits(data: bytes, places: list[int]) -> bytes:
    flipped = bytearray(data)
    for place in places:
        if flipped:
            flipped[place // 8 % len(flipped)] ^= 1 << place % 8
    return bytes(flipped)


@st.composite
def spoil_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Never the same bytes again, but for the rare case in which a repetition changes nothing."""
    match draw(st.sampled_from(["cut", "flip", "repeat", "zero", "append", "flip the start"])):
        case "cut":
            return data[: draw(st.integers(0, max(0, len(data) - 1)))]
        case "flip":
            return flip_bits(data, draw(st.lists(st.integers(0, 8 * len(data)), min_size=1, max_size=8, unique=True)))
        case "flip the start":  # where the lengths, names and numbers stand
            return flip_bits(data, draw(st.lists(st.integers(0, 8 * 400), min_size=1, max_size=4, unique=True)))
        case "repeat":
            begin = draw(st.integers(0, len(data)))
            end = draw(st.integers(begin, len(data)))
            return data[:end] + data[begin:end] + data[end:]
        case "zero":
            begin = draw(st.integers(0, len(data)))
            return data[:begin] + bytes(len(data) - begin)
        case _:
            return data + draw(st.binary(min_size=1, max_size=100))


# Nothing of it is a rank, a round or an incarnation that lives.
JUNK = st.sampled_from(["", " ", "-1", "1e3", "0x1", "99", "1" * 19, "nan", "a" * 200, "é".encode().decode("latin-1")])


@st.composite
def spoil(draw: st.DrawFn, requests: list[Sent]) -> Sent:
    """One of these requests with another body, or with a header that is missing, twice there, or junk."""
    request = draw(st.sampled_from(requests))
    headers = [(name, value) for name, value in request.headers if name not in ("content-length", "transfer-encoding")]
    content = request.content
    if content and draw(st.booleans()):
        content = draw(spoil_bytes(content))
    else:
        place = draw(st.integers(0, len(headers) - 1))
        name, _ = headers[place]
        match draw(st.sampled_from(["junk", "missing", "twice"])):
            case "junk":
                headers[place] = (name, draw(JUNK))
            case "missing":
                del headers[place]
            case _:
                headers.append((name, draw(JUNK)))
    return replace(request, headers=tuple(headers), content=content)


def send_raw(address: str, data: bytes) -> bytes:
    """Send bytes as they are and say that there will be no more; returns what comes back, if anything does."""
    url = urlsplit(address)
    answer = b""
    with socket.create_connection((url.hostname, url.port), timeout=5) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(0.5)
            while chunk := connection.recv(65_536):
                answer += chunk
        except OSError:
            pass  # closed on us, or kept open with nothing to say
    return answer
