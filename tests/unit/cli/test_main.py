"""The program: its imports, errors, interruption and files, and the settings of `gradpost serve`."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gradpost import main
from gradpost.output import CommandError, whole_file
from gradpost.settings import Role, settings_class
from ps_config.environment import SettingsError
from ps_protocol.errors import BadModel, GradpostError, Unreachable
from services.coordinator.settings import CoordinatorSettings
from services.runtime.settings import ServiceSettings

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


# ---------------------------------------------------------------------- serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServiceSettings]:
    """The settings that the coordinator was run with; it ends at once, with exit code 5."""
    settings: list[ServiceSettings] = []

    def main(given: ServiceSettings) -> None:
        settings.append(given)
        raise SystemExit(5)

    monkeypatch.setattr(importlib.import_module("services.coordinator.process"), "main", main)
    return settings


def test_flag_over_environment_over_file_over_default(
    run_command: RunCommand, served: list[ServiceSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gradpost.toml"
    file.write_text('num_trainers = 1\nnum_pservers = 1\nplacement = "hash"\nthreads = 3\n')
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", str(file))
    monkeypatch.setenv("GRADPOST_NUM_TRAINERS", "2")
    monkeypatch.setenv("GRADPOST_NUM_PSERVERS", "2")
    outcome = run_command("serve", "coordinator", "--num-trainers", "3")
    assert outcome.exit_code == 5, outcome.stderr
    expected = CoordinatorSettings(num_trainers=3, num_pservers=2, placement="hash")
    assert served == [expected]
    assert served[0].model_fields_set == expected.model_fields_set  # nothing was passed that was not given


@pytest.mark.parametrize(
    ("role", "of_no_use"), [("coordinator", {"coordinator", "listen_fd"}), ("pserver", {"lease_seconds", "listen_fd"})]
)
def test_every_setting_of_the_role_is_a_flag(run_command: RunCommand, role: Role, of_no_use: set[str]) -> None:
    outcome = run_command("serve", role, "--help")
    assert outcome.exit_code == 0
    flags = {flag.replace("-", "_") for flag in re.findall(r"^  --([a-z0-9-]+)", outcome.stdout, re.MULTILINE)}
    assert flags - {"help"} == set(settings_class(role).model_fields) - of_no_use
    assert f"Usage: gradpost serve {role} [OPTIONS]" in outcome.stdout
    assert "[default: 127.0.0.1]" in " ".join(outcome.stdout.split())
    assert "auto|console|json" in outcome.stdout
