"""A command that cannot run prints one line for each problem on stderr, and ends with an exit code."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_config.environment import PREFIX
from ps_protocol.routes import STATUS

from ..protocol.test_access import Authority
from .conftest import RunCommand, serving
from .test_status import STATE

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
