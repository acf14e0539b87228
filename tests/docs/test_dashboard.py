"""docs/dashboard.md: its command shows the page."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from signal import SIGINT

import httpx
import pytest

from ..cluster.up_support import RunningUp, wait_until
from .markdown import ROOT, examples, read

[COMMAND] = examples(read("dashboard.md"), "sh")


@pytest.mark.cluster
@pytest.mark.extended
def test_the_page_is_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    command, _, page = COMMAND.text.replace("7070", port).partition("# then open ")
    gradpost, up, *arguments = shlex.split(command)
    assert (gradpost, up) == ("gradpost", "up")
    with RunningUp(*arguments, folder=ROOT, GRADPOST_STATE_DIR=str(tmp_path)) as running:

        def trains() -> bool:
            try:
                return httpx.get(f"{page.strip()}/v1/status").json()["state"] == "training"
            except httpx.TransportError:
                return False

        assert wait_until(trains, 90)
        assert "<title>" in httpx.get(page.strip()).raise_for_status().text
        running.signal(SIGINT)
        running.finish()
