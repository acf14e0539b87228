from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gradpost import main
from gradpost.output import CommandError, whole_file
from ps_config.environment import SettingsError
from ps_protocol.errors import BadModel, GradpostError, Unreachable

from .conftest import ROOT, RunCommand, run_process

HEAVY = "torch numpy fastapi uvicorn httpx safetensors prometheus_client structlog services trainer_client"

IMPORTED = """
import sys
from gradpost.main import main
sys.argv = ["gradpost", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print([name for name in "{heavy}".split() if name in sys.modules], file=sys.stderr)
""".replace("{heavy}", HEAVY)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plan", "--help"], ["plan", "--param", "w:10x10", "--pservers", "1", "--json"]],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    """Help and plan answer within a second, which torch alone would take."""
    outcome = run_process("-c", IMPORTED, *arguments)
    assert (outcome.exit_code, outcome.stderr) == (0, "[]\n")
    assert outcome.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["plan", "--frobnicate"],
        ["plan", "--pservers", "two"],
        ["plan"],
        ["up", "--pserver", "2", "--", "python", "train.py"],
    ],
)
def test_a_wrong_usage_is_explained(run_command: RunCommand, arguments: list[str]) -> None:
    outcome = run_command(*arguments)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "Usage: gradpost" in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("Error: ")


def test_up_refuses_wrong_settings_before_it_starts(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_command("up", "--round-timeout", "-1", "--no-resume", "--mode", "x", "--", "python", "train.py")
    assert (outcome.exit_code, outcome.stderr.splitlines()) == (2, [
        "gradpost: error: --mode: input should be 'sync', 'async' or 'ssp', not 'x'",
        "gradpost: error: --round-timeout-seconds: input should be greater than 0, not '-1'",
    ])  # fmt: skip
    monkeypatch.setenv("GRADPOST_TLS_CA", "absent.pem")
    outcome = run_command("up", "--", "python", "train.py")
    message = "gradpost: error: the TLS file absent.pem cannot be read: No such file or directory\n"
    assert (outcome.exit_code, outcome.stderr) == (2, message)


@pytest.mark.parametrize(
    ("kind", "options", "exit_code"),
    [
        (CommandError, {}, 2),
        (CommandError, {"exit_code": 3}, 3),
        (BadModel, {}, 2),
        (SettingsError, {}, 2),
        (Unreachable, {}, 1),
        (GradpostError, {}, 1),
    ],
)
def test_an_error_is_one_line_whatever_it_quotes_and_a_code(
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    options: dict[str, int],
    exit_code: int,
) -> None:
    def fail(**_: object) -> None:
        raise kind("a\nb\x1b[31m é", **options)

    monkeypatch.setattr(main, "app", fail)
    outcome = run_command()
    assert (outcome.exit_code, outcome.stdout) == (exit_code, "")
    assert outcome.stderr == "gradpost: error: a\\nb\\x1b[31m é\n"


INTERRUPTED = """
import signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
from gradpost.__main__ import main
sys.meta_path.insert(0, Interrupting())
main()
"""


def test_ctrl_c_during_the_imports_is_130() -> None:
    outcome = run_process("-c", INTERRUPTED)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (130, "", "")


def test_ctrl_c_is_130() -> None:
    """A coordinator that does not answer is waited for; there is no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gradpost", "events", "--coordinator", url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(4) == b"GET "
            process.send_signal(signal.SIGINT)
            _, logs = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in logs


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole_file(target) as partial:
        partial.write_text("old")
        assert not target.exists()
    with suppress(KeyboardInterrupt), whole_file(target) as partial:
        partial.write_text("ne")
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert target.read_text() == "old"
    with (
        pytest.raises(CommandError, match="model cannot be written: No such file or directory"),
        whole_file(tmp_path / "nowhere" / "model") as partial,
    ):
        partial.write_text("")
