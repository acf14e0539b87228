"""`docs/protocol.md`: the round that it shows in bytes, the order of the fence's checks, and repeated requests."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from ps_protocol.consistency import Consistency
from ps_protocol.errors import ERRORS
from ps_protocol.fence import FENCE_HEADER, Fence
from ps_protocol.membership import InstallRun, Membership, PserverRegistered
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import PushAnswer
from ps_protocol.routes import BARRIER, INITIAL

from .apps import call, run_pserver
from .markdown import CodeBlock, codes, example_plan, examples, read, section, table, tables


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


PROTOCOL = read("protocol.md")
PLAN = example_plan(PROTOCOL)
TEXT = section(PROTOCOL, "One round in bytes")
_, ACKNOWLEDGED, REPLIED_METADATA = (json.loads(block.text) for block in examples(TEXT, "json"))
[PUSHED] = map(read_dump, examples(TEXT, "hexdump"))
SEND, GET = map(read_request, examples(TEXT, "http"))
SET_BARRIER = Request("POST", BARRIER, {**SEND.headers, "gradpost-barrier": "batch"})
UPLOAD = Request("POST", INITIAL, {**SEND.headers, **Fence.from_headers(SEND.headers)._replace(round=0).to_headers()})
OTHER = PUSHED[:-2] + b"\0\0"  # another gradient of s


def values_of_version(version: int) -> dict[str, torch.Tensor]:
    """Return the documented values of a version."""
    w, s = re.findall(r"`w = ([\d., ]+)` and `s = ([\d.]+)`", TEXT)[version]
    return {"w.block0": torch.tensor(json.loads(f"[{w}]")).float(), "s.block0": torch.tensor([float(s)]).bfloat16()}


INITIAL_VALUES = safetensors.torch.save(values_of_version(0))


@asynccontextmanager
async def run_example() -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the pserver that holds version 0."""
    fence = Fence.from_headers(SEND.headers)
    install = InstallRun(
        run=fence.run, attempt=0, plan=PLAN, incarnation=1, consistency=Consistency(), nonfinite="reject",
        patience_seconds=10, uploader=0, number=1, membership=Membership({0: 1}),
    )  # fmt: skip
    async with run_pserver() as (pserver, app), call(app) as http:
        await pserver.adopt_identity(PserverRegistered(index=0, incarnation=1, lease_seconds=10))
        await pserver.install_run(install)
        uploaded = await UPLOAD.send(http, INITIAL_VALUES)
        assert PushAnswer.model_validate_json(uploaded.content).complete
        yield http


@pytest.mark.asyncio
async def test_a_pserver_answers_the_requests_bit_for_bit() -> None:
    for request, body in ((SEND, PUSHED), (GET, b"")):
        fence = Fence.from_headers(request.headers)
        assert (fence.plan, fence.round) == (SlicePlan.from_json(PLAN).digest, 1)
        assert request.headers["content-length"] == str(len(body))
    async with run_example() as http:
        acknowledged = await SEND.send(http, PUSHED)
        replied = await GET.send(http)
    assert (acknowledged.status_code, acknowledged.json()) == (200, ACKNOWLEDGED)
    assert replied.status_code == 200
    header = replied.content[8 : 8 + int.from_bytes(replied.content[:8], "little")]
    assert json.loads(header)["__metadata__"] == REPLIED_METADATA
    torch.testing.assert_close(safetensors.torch.load(replied.content), values_of_version(1), rtol=0, atol=0)


def fence_with(**changes: Any) -> dict[str, str]:
    """Return the header of the example's fence with other words."""
    return {"gradpost_fence": Fence.from_headers(SEND.headers)._replace(**changes).to_headers()[FENCE_HEADER]}


def code_of(response: httpx.Response) -> str:
    return str(response.json()["code"])


@pytest.mark.asyncio
async def test_a_fence_is_checked_in_the_documented_order() -> None:
    rows = table(section(PROTOCOL, "The fence"), "check")
    documented = [name for row in rows for name in codes(row["error"]) if name in ERRORS]
    wrong: dict[str, Any] = {
        "run": "other", "plan": "other", "pserver_incarnation": 2, "trainer_incarnation": 2, "round": 9,
    }  # fmt: skip
    seen = []
    async with run_example() as http:
        while wrong:
            seen.append(code_of(await SEND.send(http, PUSHED, **fence_with(**wrong))))
            wrong.pop(next(iter(wrong)))
        await SEND.send(http, PUSHED)
        await GET.send(http)
        seen.append(code_of(await GET.send(http, **fence_with(round=0), gradpost_barrier="batch")))
    assert seen == documented


@pytest.mark.asyncio
async def test_repeated_requests_are_answered_as_documented() -> None:
    rows = tables(section(PROTOCOL, "Again and again: what may be retried"))[0]
    documented = {row["request"]: codes(row["the same again"]) for row in rows}
    async with run_example() as http:
        assert (await UPLOAD.send(http, PUSHED)).json()["status"] in documented["`initial`"]
        assert code_of(await SET_BARRIER.send(http)) == "contribution_missing"
        await SEND.send(http, PUSHED)
        again = (await SEND.send(http, PUSHED)).json()
        assert (again["status"], again["staged"], again["duplicates"]) == ("staged", 0, 2)
        conflict = code_of(await SEND.send(http, OTHER))
        assert documented["`send`, round open"] == ["duplicates", conflict] == ["duplicates", "contribution_conflict"]
        assert [(await SET_BARRIER.send(http)).status_code for _ in range(2)] == [200, 200]
        replied, *repeated = [(await GET.send(http)).content for _ in range(3)]
        assert repeated == [replied] * 2
        assert (await SET_BARRIER.send(http)).json() == {"round": 2, "missing": [0], "notice": ""}
        assert (await SEND.send(http, OTHER)).json()["status"] in documented["`send`, round applied"]
        assert (await GET.send(http)).content == replied
        await SEND.send(http, PUSHED, **fence_with(round=2))
        assert (await GET.send(http, **fence_with(round=2))).status_code == 200
        assert [code_of(await GET.send(http))] == documented["`get`"] == ["stale_round"]
