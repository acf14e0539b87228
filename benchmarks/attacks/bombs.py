"""Bodies that are small on the wire and large in memory, or long to parse."""

from __future__ import annotations

import gzip
import struct

import httpx

from ps_protocol.routes import DECLARE_MODEL, JOIN_TRAINER, RUN

from .outcome import Outcome, paced
from .target import Target

MIB = 1024 * 1024


def post(
    target: Target, seconds: float, per_second: float, **requests: tuple[str, str, dict[str, str], bytes]
) -> Outcome:
    """Send each of these (method, address, headers, body) by turns; answers are counted by name and status."""
    outcome = Outcome(connections=1)
    with httpx.Client(trust_env=False, timeout=60) as http:
        for number in paced(seconds, per_second):
            name, (method, url, headers, body) = [*requests.items()][number % len(requests)]
            try:
                response = http.request(method, url, headers=headers, content=body)
                outcome.answers[f"{name} {response.status_code} {response.json().get('code', '')}"] += 1
            except httpx.HTTPError as error:
                outcome.answers[type(error).__name__] += 1
            outcome.sent += 1
    return outcome


def frame(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def frame_header_bombs(target: Target, seconds: float) -> Outcome:
    """Frames whose JSON header is as large as may be, deep, or said to be larger than any memory."""
    send = target.address + target.send_path
    many = b"{" + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(16_000)) + b"}"
    return post(
        target, seconds, 5,
        many=("POST", send, target.fence, frame(many)),
        deep=("POST", send, target.fence, frame(b'{"a":' + b"[" * (MIB - 100))),
        long=("POST", send, target.fence, struct.pack("<Q", 2**63) + b"{}"),
        numbers=("POST", send, target.fence, frame(b'{"a":' + b"9" * (MIB - 100) + b"}")),
    )  # fmt: skip


def json_bombs(target: Target, seconds: float) -> Outcome:
    """JSON messages of many small objects, or deep ones."""
    json_type = {"content-type": "application/json"}
    small, large = b"[" + b"[]," * (MIB // 4) + b"[]]", b"[" + b"{}," * (16 * MIB) + b"{}]"
    return post(
        target, seconds, 1,
        join=("POST", target.coordinator + JOIN_TRAINER, json_type, small),
        model=("POST", target.coordinator + DECLARE_MODEL.format(rank=0), json_type, large),
        run=("PUT", target.address + RUN, json_type, large),
        deep=("PUT", target.address + RUN, json_type, b"[" * MIB),
    )  # fmt: skip


def gzip_bombs(target: Target, seconds: float) -> Outcome:
    """Bodies that would be a thousand times as large, if somebody unpacked them."""
    packed = gzip.compress(b"[" + b" " * (100 * MIB) + b"]")
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    return post(
        target, seconds, 5,
        join=("POST", target.coordinator + JOIN_TRAINER, headers, packed),
        send=("POST", target.address + target.send_path, {**target.fence, **headers}, packed),
    )  # fmt: skip
