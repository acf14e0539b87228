"""Bodies that are small on the wire and large in memory, or slow to parse."""

from __future__ import annotations

import gzip
import struct

import httpx

from ps_protocol.routes import DECLARE_MODEL, JOIN_TRAINER, RUN

from .target import Outcome, Target, paced

MIB = 1024 * 1024


def post(
    target: Target, seconds: float, per_second: float, **requests: tuple[str, str, dict[str, str], bytes]
) -> Outcome:
    """Send these requests (method, address, headers, body) in turn, and count the answers by name and status."""
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
    """Send frames whose JSON header has the largest size, is nested deeply, or declares an enormous length."""
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
    """Send JSON messages of many small objects, or of deeply nested ones."""
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
    """Send bodies that would be a thousand times as large when decompressed."""
    packed = gzip.compress(b"[" + b" " * (100 * MIB) + b"]")
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    return post(
        target, seconds, 5,
        join=("POST", target.coordinator + JOIN_TRAINER, headers, packed),
        send=("POST", target.address + target.send_path, {**target.fence, **headers}, packed),
    )  # fmt: skip
