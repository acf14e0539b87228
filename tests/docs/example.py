"""The round that docs/protocol.md shows in bytes, decoded from there, and the pserver that it is for."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import safetensors.torch
import torch

from ps_protocol.consistency import Consistency
from ps_protocol.fence import Fence
from ps_protocol.membership import Membership
from ps_protocol.messages import InstallRun, PserverRegistered, PushAnswer
from ps_protocol.routes import INITIAL

from .apps import call, run_pserver
from .markdown import CodeBlock, examples, read, section


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]

    async def send(self, http: httpx.AsyncClient, body: bytes = b"", **headers: str) -> httpx.Response:
        """Send it, with some of its headers replaced (`gradpost_round="2"`)."""
        replaced = {name.replace("_", "-"): value for name, value in headers.items()}
        known = {name: value for name, value in self.headers.items() if name != "content-length"}
        return await http.request(self.method, self.path, headers={**known, **replaced}, content=body)


def read_request(block: CodeBlock) -> Request:
    first, *rest = block.text.splitlines()
    method, path, version = first.split()
    assert version == "HTTP/1.1"
    return Request(method, path, dict(line.split(": ") for line in rest))


def read_dump(block: CodeBlock) -> bytes:
    """Decode a hex dump, and check its own offsets and characters."""
    data = b""
    for line in block.text.splitlines():
        match = re.fullmatch(r"([0-9a-f]{8})  ([0-9a-f ]+?) +\|(.*)\|", line)
        assert match, line
        row = bytes.fromhex(match[2])
        assert int(match[1], 16) == len(data), line
        assert "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row) == match[3], line
        data += row
    return data


TEXT = section(read("protocol.md"), "One round in bytes")
PLAN, ACKNOWLEDGED = (json.loads(block.text) for block in examples(TEXT, "json"))
PUSHED, REPLIED = map(read_dump, examples(TEXT, "hexdump"))
SEND, GET = map(read_request, examples(TEXT, "http"))


@asynccontextmanager
async def run_example() -> AsyncIterator[httpx.AsyncClient]:
    """A client of the pserver that holds version 0."""
    fence = Fence.from_headers(SEND.headers)
    initial = re.search(r"`w = ([\d, ]+)` and `s = (\d)`", TEXT)
    assert initial
    w, s = [float(value) for value in initial[1].split(",")], float(initial[2])
    values = {"w.block0": torch.tensor(w), "s.block0": torch.tensor([s], dtype=torch.bfloat16)}
    install = InstallRun(
        run=fence.run,
        attempt=0,
        plan=PLAN,
        incarnation=1,
        consistency=Consistency(),
        nonfinite="reject",
        round_timeout_seconds=10,
        uploader=0,
        number=1,
        membership=Membership({0: 1}),
    )
    async with run_pserver() as (pserver, app), call(app) as http:
        await pserver.registered(PserverRegistered(index=0, incarnation=1, lease_seconds=10))
        await pserver.install_run(install)
        body = safetensors.torch.save(values)
        uploaded = await http.post(INITIAL, headers=fence.at_round(0).to_headers(), content=body)
        assert PushAnswer.model_validate_json(uploaded.content).complete
        yield http
