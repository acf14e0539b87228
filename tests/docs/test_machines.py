"""`docs/machines.md`: its commands train, by hand and by ssh on loopback; the batch script of Slurm is not run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..cluster.trainer_processes import free_port
from .markdown import ROOT, examples, read
from .stage import GRADPOST, environment, run_shell

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(400)]

TEXT = read("machines.md")
[TOKENS] = examples(TEXT, "sh")
[BY_HAND] = examples(TEXT, "console")
COPY, LOOP, *_ = (block.text for block in examples(TEXT, "bash"))


def make_folder(folder: Path, *arguments: str) -> None:
    """Make the tokens, the script, and programs `gradpost` and `python` in `folder`/bin."""
    script = (ROOT / "tests" / "cluster" / "training_script.py").read_text()
    (folder / "train.py").write_text(script.replace("sys.argv[1:]", repr(list(arguments))))
    (folder / "bin").mkdir()
    write_program(folder / "bin" / "gradpost", *GRADPOST)
    write_program(folder / "bin" / "python", sys.executable)
    run_shell(folder, TOKENS.text)


def write_program(path: Path, *command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def test_by_hand(tmp_path: Path) -> None:
    """Each machine is an address on loopback."""
    make_folder(tmp_path, "20")
    text = BY_HAND.text.replace("10.0.0.", "127.0.0.").replace("7070", str(free_port()))
    text = text.replace("/var/lib", str(tmp_path))
    coordinator, pserver, trainer = (line.removeprefix("$ ") for line in text.splitlines())
    services = [coordinator, *(pserver.replace("--pserver-index 0", f"--pserver-index {i}") for i in range(2))]
    trainers = [trainer.replace("RANK=0", f"RANK={rank}") for rank in range(2)]
    env = environment({
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GRADPOST_TOKENS_DIR": str(tmp_path / "tokens"),
    })  # fmt: skip
    started: list[subprocess.Popen[str]] = []
    try:
        for command in [*services, *trainers]:
            words = ["env", *shlex.split(command)]
            started.append(subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE))
        check_results("".join(trainer.communicate(timeout=200)[0] for trainer in started[3:]))
        for service in started[:3]:
            service.send_signal(signal.SIGTERM)
        assert [process.wait(100) for process in started] == [0] * 5
    finally:
        for process in started:
            process.kill()
            process.communicate()


def check_results(printed: str) -> None:
    """Check that both trainers have the result of round 20."""
    results = re.findall(r"result (\w+) 20$", printed, re.MULTILINE)
    assert len(results) == 2, printed
    assert len(set(results)) == 1


# Loopback has the addresses of both machines, and a shell takes the place of a remote one.
SSH = """
ssh() { shift 2; bash -c "$*"; }
scp() { cp -r "$2" "$3" "${4#*:}"; }
"""


def test_over_ssh(tmp_path: Path) -> None:
    make_folder(tmp_path, "20")
    text = (COPY + LOOP).replace("10.0.0.", "127.0.0.").replace("7070", str(free_port()))
    text = text.replace("/srv", str(tmp_path / "srv"))
    check_results(run_shell(tmp_path, SSH + text, PATH=f"{tmp_path}/bin:{os.environ['PATH']}"))
