"""The command line as its user meets it: exit code, stdout, stderr."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import gradpost
from gradpost.main import main
from ps_config.environment import PREFIX

ROOT = Path(gradpost.__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    exit_code: int | str | None
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


RunCommand = Callable[..., Outcome]


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run `gradpost` in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gradpost", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Outcome(caught.value.code, *capsys.readouterr())

    return run


def run_process(*arguments: str, **environment: str) -> Outcome:
    """Run a Python process that finds Gradpost, and no folder that happens to be called like a part of it."""
    process = subprocess.run(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return Outcome(process.returncode, process.stdout, process.stderr)


@contextmanager
def serving(answers: Mapping[str, str], status: int = 200) -> Iterator[str]:
    """Answer a GET of each path with its text, and of any other with 404; yields the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path, "{}").encode()
            self.send_response(status if self.path in answers else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
