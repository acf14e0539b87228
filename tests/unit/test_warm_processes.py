"""A process that was forked does what Python does with the same command: the rest of the tests rely on that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.warm.processes import Order, WarmServers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

SCRIPT = """
import atexit, json, os, sys, warnings
atexit.register(print, "at exit", flush=True)
print(json.dumps({
    "name": __name__, "arguments": sys.argv, "folder": os.getcwd(), "begin of path": sys.path[0],
    "the given": [entry for entry in sys.path if "given" in entry], "variable": os.environ["VARIABLE"],
    "environment": sorted(os.environ), "input": sys.stdin.read(), "leads": os.getpgid(0) == os.getpid() == os.getsid(0),
    "file": __file__, "parent": os.getppid(), "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:5],
}))
print("to stderr", file=sys.stderr)
try:
    warnings.warn("something")
except UserWarning:
    print("a warning is an error")
"""
# The end of a script, the flags of Python, and the exit code.
SCRIPTS = [
    ("sys.exit()", ["-W", "error"], 0),
    ("raise OSError('no')", [], 1),
    ("os.kill(0, 15)", ["-P"], -15),
    ("raise KeyboardInterrupt", ["-P"], -2),
]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmServers]:
    servers = WarmServers()
    yield servers
    servers.close()


def run(start: Any, command: list[str], **more: Any) -> tuple[list[str], int]:
    env = {**os.environ, "VARIABLE": "värde", "PYTHONUNBUFFERED": "1", "PYTHONPATH": "/given"}
    process = start(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **more,
    )
    with process.stdout as output:
        lines = output.read().decode().splitlines()
    return lines, process.wait()


@pytest.mark.parametrize(("end", "flags", "code"), SCRIPTS)
def test_a_script_sees_the_same(warm: WarmServers, tmp_path: Path, flags: list[str], end: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + end)
    command = [sys.executable, *flags, str(script), "--option", "a b"]
    (said, found), (expected, same) = run(warm.start, command), run(subprocess.Popen, command)
    assert found == same == code
    assert json.loads(said[0]) == json.loads(expected[0])
    assert said[1:] == expected[1:]
    assert ("a warning is an error" in said) == ("-W" in flags)


def test_descriptors_are_inherited_under_their_numbers(warm: WarmServers, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    script = tmp_path / "script.py"
    script.write_text(f"import os; os.write({write_end}, b'through the pipe')")
    assert run(warm.start, [sys.executable, str(script)], pass_fds=[write_end]) == ([], 0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == b"through the pipe"  # no other process holds its other end


@pytest.mark.parametrize(
    ("command", "variables", "is_warm"),
    [
        (["-c", ""], {}, False),
        (["-X", "dev", "x.py"], {}, False),
        ([], {}, False),
        (["x.py"], {"LD_PRELOAD": ""}, False),
        (["x.py"], {"OMP_NUM_THREADS": "7"}, False),
        (["x.py"], {"ATEN_CPU_CAPABILITY": "default"}, False),
        (["x.py"], {"TORCHELASTIC_RUN_ID": "none"}, True),
        (["x.py"], {"PYTHONPATH": "CUSTOMIZED"}, False),
        (["x.py"], {"GRADPOST_PORT": "0"}, True),
    ],
)
def test_what_only_a_new_interpreter_can_do_has_one(
    tmp_path: Path, command: list[str], variables: dict[str, str], is_warm: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    env = {**os.environ, **{name: value.replace("CUSTOMIZED", str(tmp_path)) for name, value in variables.items()}}
    with nullcontext() if is_warm else pytest.raises(ValueError):
        Order([sys.executable, *command], env, os.environ)
