"""`docs/protocol.md`: the start of a run that it shows in JSON, sent to a coordinator and a pserver of one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import safetensors.torch

from ps_protocol.membership import PserverRegistered, RegisterPserver
from ps_protocol.routes import INITIAL, REGISTER_PSERVER
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.coordinator.app import make_coordinator_app
from services.coordinator.coordinator import Coordinator
from services.coordinator.settings import CoordinatorSettings
from services.runtime.metrics import ServiceMetrics

from .apps import call, run_pserver
from .markdown import CodeBlock, code_blocks, examples, section
from .test_rounds import INITIAL_VALUES, PROTOCOL, SEND, read_request

TEXT = section(PROTOCOL, "The start of a run in JSON")
for language in ("http", "json"):
    examples(TEXT, language)
ADDRESS = "http://10.0.0.7:7071"
RUN = SEND.headers["gradpost-fence"].split()[1]


@asynccontextmanager
async def run_cluster(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Yield clients of a coordinator, and of its one pserver."""
    async with run_pserver() as (pserver, app), call(app) as data:
        settings = CoordinatorSettings(num_pservers=1, num_trainers=1, durability="none", state_dir=folder)
        coordinator = Coordinator(settings, data)
        metrics = ServiceMetrics("coordinator")
        async with call(make_coordinator_app(coordinator, metrics)) as control, asyncio.TaskGroup() as tasks:
            request = RegisterPserver(protocol=PROTOCOL_VERSION, instance="f3c09b7a", address=ADDRESS, http2=True)
            registered = await control.post(REGISTER_PSERVER, json=request.model_dump())
            await pserver.adopt_identity(PserverRegistered.model_validate_json(registered.content))
            stop = asyncio.Event()
            tasks.create_task(coordinator.run(stop))
            yield control, data
            stop.set()
            coordinator.changed()


def steps() -> Iterator[tuple[CodeBlock, CodeBlock | None]]:
    """Yield each request with the answer that follows it."""
    blocks = code_blocks(TEXT)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "http":
            yield block, following if following and following.language == "json" else None


@pytest.mark.asyncio
async def test_the_services_answer_the_start_of_a_run_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.coordinator.coordinator.secrets.token_hex", lambda _: RUN)
    async with run_cluster(tmp_path) as (control, data):
        for block, answer in steps():
            head, _, body = block.text.partition("\n\n")
            request = read_request(CodeBlock("http", head))
            is_data = "gradpost-fence" in request.headers
            content = INITIAL_VALUES if request.path == INITIAL else body.encode()
            response = await request.send(data if is_data else control, content)
            if answer is not None:
                assert (response.status_code, response.json()) == (200, json.loads(answer.text)), block
            elif is_data:
                assert safetensors.torch.load(response.content).keys() == {"w.block0", "s.block0"}
            else:
                assert response.status_code == 204, block
