"""The program: its imports, errors, interruption and files, the settings of `serve`, tokens and completion."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from gradpost import main
from gradpost.output import CommandError, whole_file
from gradpost.settings import Role, settings_class
from ps_config.environment import PREFIX, SettingsError
from ps_config.tokens import SCOPES, TokenFolder
from ps_protocol.errors import BadModel, GradpostError, Unreachable
from ps_protocol.routes import PARAMETERS, STATUS
from services.coordinator.settings import CoordinatorSettings
from services.runtime.settings import ServiceSettings

from ..protocol.test_access import Authority
from .conftest import ROOT, RunCommand, run_process, serving
from .test_status import STATE

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


# ---------------------------------------------------------------------- refusals


# Files of the folder in which the commands run: a text, settings, a truncated model, certificates and a token.
WHOLE = b'\x40\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
FOREIGN = "did not answer as this version of Gradpost. Check the address, any proxy and the installed version"
UP = "-- python train.py"

SERVERS: dict[str, tuple[dict[str, str], int]] = {
    "CLUSTER": ({STATUS: STATE.model_dump_json()}, 200),
    "EMPTY": ({}, 200),
    "PROXY": ({STATUS: "<html>"}, 502),
    "PAGE": ({STATUS: "<html>"}, 200),
    "OTHER": ({STATUS: '{"run": "5f0c"}'}, 200),
}

REFUSED: dict[str, tuple[int, str | list[str]]] = {
    # usage
    "frobnicate": (2, "Error: No such command 'frobnicate'"),
    "plan --frobnicate": (2, "Error: No such option: --frobnicate"),
    "plan --pservers two": (2, "Error: Invalid value for '--pservers'"),
    "plan": (2, "Error: Missing option '--pservers'"),
    f"up --pserver 2 {UP}": (2, "Error: No such option: --pserver"),
    "serve coordinator --coordinator x": (2, "Error: No such option: --coordinator"),
    # settings
    f"up --round-timeout -1 --no-resume --mode x {UP}": (2, [
        "--mode: input should be 'sync', 'async' or 'ssp', not 'x'",
        "--round-timeout-seconds: input should be greater than 0, not '-1'",
    ]),
    f"TLS_CA=absent.pem up {UP}": (2, "the TLS file absent.pem cannot be read: No such file or directory"),
    "serve coordinator --port 70000 --num-trainers 0": (2, [
        "--port: input should be less than or equal to 65535, not '70000'",
        "--num-trainers: input should be greater than or equal to 1, not '0'",
    ]),
    "serve coordinator --log-format xml": (2, "--log-format: input should be 'auto', 'console' or 'json', not 'xml'"),
    "LEASE_SECONDS=soon serve coordinator": (
        2, "GRADPOST_LEASE_SECONDS: input should be a valid number, unable to parse string as a number, not 'soon'"),
    "serve coordinator --tls-cert one.pem": (2, "tls_cert and tls_key go together: give both or neither"),
    "PROT=1 serve coordinator --port x": (
        2, "unknown environment variable GRADPOST_PROT; did you mean GRADPOST_PORT?"),
    "SETTINGS_FILE=wrong.toml serve coordinator": (
        2, "num_trainers in wrong.toml: input should be greater than or equal to 1, not '0'"),
    "serve coordinator --tls-cert one.pem --tls-key other.key": (
        2, "the TLS key other.key does not belong to the certificate one.pem"),
    "serve coordinator --advertise-address c": (
        2, "--advertise-address: expected a base URL such as http://10.0.0.5:7070, got 'c', not 'c'"),
    # plans
    "plan --pservers 2": (2, "there is nothing to plan: give a safetensors file, --param NAME:SHAPE or both"),
    "plan --pservers 2 --param w:3,4": (2, "--param w:3,4 is not NAME:SHAPE"),
    f"plan --pservers 2 --param w:{'9' * 5000}": (2, "--param w:9"),
    "plan --pservers 2 --param w:3:I64": (
        2, "parameter 'w' has a wrong dtype (expected F32, BF16, F16; actual 'I64')"),
    "plan --pservers 0 --param w:3": (2, "the number of pservers is out of range"),
    "plan --pservers 2 absent": (2, "cannot read absent: No such file or directory"),
    "plan --pservers 2 /dev/null": (2, "cannot read /dev/null: "),
    "plan --pservers 2 truncated": (2, "cannot read truncated: "),
    # tokens
    "token show": (2, "no folder of tokens is given. Give --dir, or set GRADPOST_TOKENS_DIR"),
    "token show --dir .": (1, "there is no token file read; "),
    "token create --dir text": (1, f"text: {os.strerror(17)}"),
    # the coordinator
    "status --coordinator http://127.0.0.1:1": (
        1, "no coordinator: no answer from http://127.0.0.1:1: [Errno 111] Connection refused. Give its address with "
        "--coordinator or GRADPOST_COORDINATOR"),
    "status --coordinator CLOSES": (1, "; if it serves TLS, its address begins with https:. Give its address with "),
    "status --coordinator ftp://x": (
        2, "the coordinator's address: expected a base URL such as http://10.0.0.5:7070, "),
    "status --coordinator EMPTY": (1, "answered 404, but not as Gradpost: "),
    "status --coordinator PROXY": (1, "answered 502, but not as Gradpost: <html>. Check the address and any proxy"),
    "status --coordinator PAGE": (1, FOREIGN),
    "status --coordinator OTHER": (1, FOREIGN),
    # packages
    "tensorboard --logdir logs --coordinator CLUSTER": (2, "this needs tensorboard: pip install '.[tensorboard]' ("),
    "mlflow --coordinator CLUSTER": (2, "this needs mlflow: pip install '.[mlflow]' ("),
    "wandb --coordinator CLUSTER": (2, "this needs wandb: pip install '.[wandb]' ("),
}  # fmt: skip


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command[:60])
def test_a_command_is_refused(
    command: str, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("torch.utils.tensorboard", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    Path("text").touch()
    Path("wrong.toml").write_text("num_trainers = 0")
    Path("truncated").write_bytes(WHOLE)
    authority = Authority(Path())
    authority.issue("one")
    authority.issue("other")
    before = sorted(tmp_path.rglob("*"))
    exit_code, messages = REFUSED[command]
    words = command.split()
    while "=" in words[0]:
        name, value = words.pop(0).split("=")
        monkeypatch.setenv(PREFIX + name, value)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        if "CLOSES" in words:
            pool.submit(lambda: server.accept()[0].close())
        servers = {word: stack.enter_context(serving(*SERVERS[word])) for word in words if word in SERVERS}
        servers["CLOSES"] = f"127.0.0.1:{server.getsockname()[1]}"
        outcome = run_command(*(servers.get(word, word) for word in words))
    assert (outcome.exit_code, outcome.stdout) == (exit_code, "")
    lines = outcome.stderr.splitlines()
    if "Error: " in messages:
        assert lines[0].startswith("Usage: gradpost")
        assert lines[-1].startswith(messages)
        return
    messages = [messages] if isinstance(messages, str) else messages
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith("gradpost: error: ")
        assert message in line
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------------- tokens and completion


def read(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text().strip() for file in folder.iterdir()}


def test_missing_tokens_are_created_and_shown(
    run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container that writes them may run again, and keeps the existing ones."""
    folder = tmp_path / "new" / "tokens"
    run_command("token", "create", "--dir", folder, "--scope", "train")
    before = read(folder)
    outcome = run_command("token", "create", "--dir", folder)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines() == [  # and no token
        f"{folder}/{scope}: {'kept' if scope == 'train' else 'created'}" for scope in SCOPES
    ]
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o400}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert before.items() <= read(folder).items()
    monkeypatch.setenv("GRADPOST_TOKENS_DIR", str(folder))
    shown = [run_command("token", "show", "--scope", scope).stdout.strip() for scope in SCOPES]
    assert [TokenFolder(folder).scope_of(token) for token in shown] == list(SCOPES)


def test_a_rotation_keeps_the_previous_token_valid(run_command: RunCommand, tmp_path: Path) -> None:
    run_command("token", "create", "--dir", tmp_path)
    first = read(tmp_path)
    rotate = ("token", "create", "--dir", tmp_path, "--scope", "read", "--rotate")
    outcome = run_command(*rotate)
    assert outcome.stdout == f"{tmp_path}/read: replaced; the previous token stays valid until the next rotation\n"
    second = read(tmp_path)
    assert second["read"] != first["read"]
    assert second == {**first, "read": second["read"], "read.previous": first["read"]}
    assert TokenFolder(tmp_path).scope_of(first["read"]) == "read"
    run_command(*rotate)
    accepted = TokenFolder(tmp_path)
    assert [accepted.scope_of(token) for token in (first["read"], second["read"])] == [None, "read"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o400}


# ---------------------------------------------------------------------- completion


# Defines `complete_line`, which prints the completions at the end of a line.
SCRIPT = """
eval "$(gradpost --show-completion bash)"
complete_line() {
    eval "COMP_WORDS=($1 ${2:-\\"\\"})"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    $(complete -p gradpost | sed 's/.*-F \\([^ ]*\\).*/\\1/') gradpost
    printf '%s\\n' "${COMPREPLY[@]}"
}
"""


def complete(folder: Path, line: str, last: str = "", **environment: str) -> list[str]:
    """Return the completions of the last word of a line, without their help."""
    program = folder / "gradpost"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m gradpost "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", SCRIPT + f"complete_line {shlex.quote(line)} {shlex.quote(last)}\n"],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
            **environment,
        },
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [line.split("\t")[0] for line in done.stdout.splitlines() if line]


def test_commands_settings_and_parameters_are_completed(tmp_path: Path) -> None:
    assert complete(tmp_path, "gradpost", "st") == ["status", "stop"]
    assert complete(tmp_path, "gradpost serve coordinator", "--dur") == ["--durability"]
    listed = {"parameters": [{"name": name} for name in ("0.weight", "1.weight", "1.bias")]}
    with serving({PARAMETERS: json.dumps(listed)}) as url:
        found = complete(tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR=url)
    assert found == ["1.weight", "1.bias"]
    assert complete(tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR=url) == []
