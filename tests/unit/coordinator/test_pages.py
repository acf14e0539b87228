"""Replies of the coordinator: the files of the dashboard, the targets of Prometheus, and long responses."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load
from starlette.types import ASGIApp, Message

from ps_config.hosts import reachable_host
from ps_config.tokens import TokenFolder
from ps_protocol.frames import encode_header
from ps_protocol.plan import make_plan
from ps_protocol.routes import JOIN_TRAINER
from ps_protocol.vocabulary import PROTOCOL_VERSION, ParameterSpec
from services.coordinator import inspection, pages
from services.coordinator.coordinator import Coordinator
from services.coordinator.inspection import open_file
from services.coordinator.pages import add_dashboard_routes
from services.coordinator.process import describe_targets, is_own_address, make_coordinator_app
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state.cluster import Cluster
from services.runtime import app as app_module
from services.runtime.app import MAX_AT_ONCE, PART_BYTES, make_app
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import Guard, KnownHosts, protect

from .coordinating import eventually
from .support import change_record, joining, make_cluster, model, registration
from .test_standbys import report


@pytest.fixture
def app() -> FastAPI:
    app = make_app(title="t", role="coordinator", metrics=ServiceMetrics("coordinator"), is_ready=lambda: None)
    add_dashboard_routes(app)
    return app


async def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as http:
        return await http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})


async def test_all_files_of_the_page_are_public(app: FastAPI, tmp_path: Path) -> None:
    app.state.guard = Guard(tokens=TokenFolder(tmp_path))
    page = await get(app, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(names) >= 4
    scripts = {name.partition("/")[2] for name in names if name.endswith(".js")}
    while scripts:  # and what they import
        name = scripts.pop()
        reply = await get(app, f"/dashboard/{name}")
        assert reply.headers["content-type"].startswith("text/javascript")
        names.append(f"dashboard/{name}")
        scripts |= {
            found for found in re.findall(r'from "\./([^"]+)"', reply.text) if f"dashboard/{found}" not in names
        }
    assert {f"dashboard/{path.name}" for path in pages._FOLDER.iterdir()} - {"dashboard/index.html"} == set(names)
    for name in names:
        reply = await get(app, "/" + name)
        assert reply.status_code == 200, name


async def test_the_page_has_no_inline_code_and_no_other_origins(app: FastAPI) -> None:
    page = await get(app, "/")
    assert "script-src 'self'; style-src 'self';" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle=|javascript:", page.text)
    for path in pages._FOLDER.iterdir():
        others = set(re.findall(r"https?://[^\"'`\s]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not others, path


async def test_files_are_compressed_and_cached(app: FastAPI) -> None:
    plain = await get(app, "/dashboard/app.js", accept_encoding="identity")
    assert "content-encoding" not in plain.headers
    packed = await get(app, "/dashboard/app.js", accept_encoding="gzip")
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "accept-encoding")
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) == len(gzip.compress(plain.content, mtime=0)) < len(plain.content)
    again = await get(app, "/dashboard/app.js", if_none_match=plain.headers["etag"])
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", plain.headers["etag"])


async def test_other_names_are_not_found_and_not_cached(app: FastAPI) -> None:
    kept = pages.read_file.cache_info().currsize
    for name in ("files.py", "..%2Ffiles.py", "index.html", "x" * 1000, "%00"):
        reply = await get(app, f"/dashboard/{name}")
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found"), name
    assert pages.read_file.cache_info().currsize == kept


# ---------------------------------------------------------------------- targets of Prometheus


def cluster_of(pservers: list[str], trainers: list[str | None]) -> Cluster:
    cluster = make_cluster(num_trainers=len(trainers), num_pservers=len(pservers), on_trainer_loss="continue")
    for index, address in enumerate(pservers):
        cluster.register_pserver(registration(f"pserver {index}", index=index, address=address), 0)
    for rank, metrics_address in enumerate(trainers):
        answer = cluster.join_trainer(joining(f"trainer {rank}", rank=rank, metrics_address=metrics_address), 0)
        cluster.declare_model(rank, model(answer.incarnation, answer.run), 0.0)
    cluster.start_run_if_complete(0)
    assert cluster.run.record.plan is not None
    cluster.run = cluster.run.begin_training(0)
    cluster.run = cluster.run.finish_change(cluster.run.record.change_number)
    return cluster


def addresses(cluster: Cluster) -> list[str]:
    return [target for group in describe_targets(cluster) for target in group["targets"]]


def test_every_process_is_a_target_with_its_role_and_number():
    cluster = cluster_of(["http://10.0.0.1:7071", "http://10.0.0.2:7071"], ["http://10.0.0.3:1", None])
    cluster.report_standby(report("s", address="http://10.0.0.4:1"), 0)
    plain = {"__scheme__": "http", "__metrics_path__": "/metrics"}
    assert describe_targets(cluster) == [
        {"targets": ["10.0.0.1:7071"], "labels": {**plain, "role": "pserver", "pserver": "0"}},
        {"targets": ["10.0.0.2:7071"], "labels": {**plain, "role": "pserver", "pserver": "1"}},
        {"targets": ["10.0.0.4:1"], "labels": {**plain, "role": "standby", "pserver": "0"}},
        {"targets": ["10.0.0.3:1"], "labels": {**plain, "role": "trainer", "trainer": "0"}},  # the other serves none
    ]


OWN = reachable_host("0.0.0.0")


@pytest.mark.parametrize(
    ("client", "listed", "not_listed"),
    [
        (
            "10.0.0.7",
            ["10.0.0.7", "trainer.example", "a.inner"],
            ["10.0.0.8", "169.254.169.254", "b", "localhost", OWN],
        ),
        ("fd00::7", ["[fd00::7]", "[fd00:0::7]"], ["[fd00::8]", "[::1]"]),
        ("::ffff:10.0.0.7", ["10.0.0.7"], ["10.0.0.8"]),
        ("127.0.0.1", ["127.0.0.1", "localhost", "[::1]", OWN], ["169.254.169.254"]),
        ("10.0.0.1", ["127.0.0.1", "10.0.0.1"], ["10.0.0.2"]),  # on the coordinator's machine, by its address
    ],
)
def test_a_trainer_lists_no_host_but_its_own(client: str, listed: list[str], not_listed: list[str]):
    hosts = KnownHosts(["trainer.example", "*.inner"])
    for host in (*listed, *not_listed):
        assert is_own_address(f"http://{host}:1", client, "10.0.0.1", hosts) == (host in listed), host


async def test_the_metrics_of_a_trainer_with_another_host_are_not_listed(tmp_path: Path):
    async with httpx.AsyncClient() as http:
        coordinator = Coordinator(CoordinatorSettings(num_trainers=3, state_dir=tmp_path), http)
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        protect(app, CoordinatorSettings(allowed_hosts="trainer.example"), "http://10.0.0.1:7070")
        transport = httpx.ASGITransport(app=app, client=("10.0.0.7", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1:7070") as trainer:
            for host in ("10.0.0.7", "10.0.0.8", "trainer.example"):
                message = {
                    "protocol": PROTOCOL_VERSION,
                    "instance": f"a process at {host}",
                    "metrics_address": f"http://{host}:1",
                }
                assert (await trainer.post(JOIN_TRAINER, json=message)).status_code == 200
    assert addresses(coordinator.cluster) == ["10.0.0.7:1", "trainer.example:1"]


# ---------------------------------------------------------------------- long responses


NUM_PARTS = 50
NUM_ELEMENTS = NUM_PARTS * PART_BYTES // 2 + 1  # of bfloat16, in parts that begin in the middle of an element
ONE = (0x3F80).to_bytes(2, "little")


class ParameterReader:
    """Calls the route of a parameter, reads the parts when `may_read` is set, and disconnects when `leaves` is set."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.may_read = asyncio.Event()
        self.has_headers = asyncio.Event()
        self.start: dict[str, Any] = {}
        self.parts: list[bytes] = []
        self._has_sent = False

    async def call(self, app: ASGIApp) -> None:
        scope = {
            "type": "http", "method": "GET", "path": "/v1/parameters/w", "query_string": b"", "http_version": "2",
            "headers": [(b"host", b"localhost")],
        }  # fmt: skip
        await app(scope, self.receive, self.send)

    async def receive(self) -> Message:
        if self._has_sent:
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        self._has_sent = True
        return {"type": "http.request"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = dict(message)
            self.has_headers.set()
            return
        await self.may_read.wait()
        self.parts.append(message["body"])


class Pservers(httpx.AsyncBaseTransport):
    """Pservers that serve one parameter of a block each, part by part as the parts are read."""

    def __init__(self, number: int = 1) -> None:
        self.plan = make_plan([ParameterSpec("w", (NUM_ELEMENTS,), "BF16")], number)
        self.num_taken = [0] * number

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        [block] = [block for block in self.plan.blocks if block.name == request.url.params["name"]]
        facts = {"run": "r", "attempt": "0", "round": "7"}
        header = encode_header([(block.name, "BF16", (block.num_elements,))], facts)
        num_bytes = 2 * block.num_elements

        async def parts() -> AsyncIterator[bytes]:
            yield header
            for begin in range(0, num_bytes, PART_BYTES - 1):
                self.num_taken[block.pserver] += 1
                yield (ONE * (PART_BYTES // 2 + 1))[begin % 2 :][: min(PART_BYTES - 1, num_bytes - begin)]

        return httpx.Response(200, content=parts())


@asynccontextmanager
async def serving(pservers: Pservers) -> AsyncIterator[Coordinator]:
    async with httpx.AsyncClient(transport=pservers) as http:
        number = len(pservers.num_taken)
        coordinator = Coordinator(CoordinatorSettings(num_pservers=number), http)
        for index in range(number):
            coordinator.cluster.register_pserver(registration(str(index), index=index), coordinator.now())
        change_record(coordinator.cluster, plan=pservers.plan)
        yield coordinator


def read(app: ASGIApp, tasks: asyncio.TaskGroup) -> tuple[ParameterReader, asyncio.Task[None]]:
    reader = ParameterReader()
    return reader, tasks.create_task(reader.call(app))


async def test_slow_readers_are_limited_and_unread_parts_are_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PATIENCE_SECONDS", 0.1)
    pservers = Pservers()
    async with serving(pservers) as coordinator, asyncio.TaskGroup() as tasks:
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        slow = [read(app, tasks) for _ in range(MAX_AT_ONCE)]
        for reader, _ in slow:
            await reader.has_headers.wait()
        late, refused = read(app, tasks)
        late.may_read.set()
        await refused
        assert (late.start["status"], json.loads(b"".join(late.parts))["code"]) == (503, "overloaded")
        assert pservers.num_taken[0] <= 3 * MAX_AT_ONCE
        for reader, answered in slow:
            reader.may_read.set()
            await answered
            headers = dict(reader.start["headers"])
            assert headers[b"gradpost-round"] == b"7"
            body = b"".join(reader.parts)
            assert len(body) == int(headers[b"content-length"])
            values = load(body)["w"]
            assert (values.dtype, values.shape) == (torch.bfloat16, (NUM_ELEMENTS,))
            assert bool((values == 1).all())
        next_, answered = read(app, tasks)  # a slot is free again
        next_.may_read.set()
        await answered
        assert next_.start["status"] == 200


async def test_later_blocks_are_received_while_a_slow_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their pserver would close the connection as stalled."""
    monkeypatch.setattr(inspection, "STILL_SECONDS", 0.02)
    pservers = Pservers(2)
    async with serving(pservers) as coordinator, open_file(coordinator, "w") as stream:
        parts = [await anext(stream.parts), await anext(stream.parts)]
        await eventually(lambda: pservers.num_taken[1] > 10)
        parts += [part async for part in stream.parts]
        assert len(b"".join(parts)) == stream.num_bytes
        assert b"".join(parts).endswith(ONE * NUM_ELEMENTS)
