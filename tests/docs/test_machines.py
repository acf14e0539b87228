"""`docs/machines.md`: its commands train, by hand and by ssh on loopback, and with Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ..cluster.trainer_processes import free_port
from .markdown import ROOT, examples, read
from .stage import GRADPOST, environment, run_shell

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(400)]

TEXT = read("machines.md")
[TOKENS] = examples(TEXT, "sh")
[BY_HAND] = examples(TEXT, "console")
COPY, LOOP, _, BATCH = (block.text for block in examples(TEXT, "bash"))


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


def need_root(*tools: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} are not installed (Debian packages slurm-wlm, munge)")


@contextmanager
def daemon(*command: str, **more: str) -> Iterator[None]:
    """Run a service in the foreground for the length of the block."""
    process = subprocess.Popen(command, env=environment(more))
    try:
        yield
        assert process.poll() is None, f"{command[0]} has ended"
    finally:
        process.terminate()
        process.wait(30)


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


# ---------------------------------------------------------------------- Slurm

SLURM = """
ClusterName=gradpost
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


@pytest.fixture
def slurm() -> Iterator[Path]:
    """Run a controller and two nodes on this machine, and return their folder, in which jobs find `gradpost`."""
    need_root("munged", "slurmctld", "slurmd", "sbatch")
    with tempfile.TemporaryDirectory(prefix="gp-") as name, ExitStack() as stack:  # a short path, for sockets
        folder = Path(name)
        ports = [free_port() for _ in range(3)]
        (folder / "slurm.conf").write_text(SLURM.format(host=os.uname().nodename, folder=folder, ports=ports))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        stack.enter_context(daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files))
        more = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "controller").mkdir()
        stack.enter_context(daemon("slurmctld", "-D", **more))
        for node in ("n1", "n2"):
            stack.enter_context(daemon("slurmd", "-D", "-N", node, **more))
        yield folder


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text() if path.exists() else f"there is no {path}"
        time.sleep(0.1)


@pytest.mark.alone
def test_with_slurm(slurm: Path) -> None:
    """The job ends by itself, and a requeued one continues its run."""
    folder = slurm / "gradpost"
    folder.mkdir()
    make_folder(folder, "20", "0.5")
    (folder / "train.sbatch").write_text(BATCH.replace("7070", str(free_port())))
    env = environment({
        "SLURM_CONF": str(slurm / "slurm.conf"), "HOME": str(slurm), "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    })  # fmt: skip
    printed = folder / "printed"
    job = subprocess.Popen(["sbatch", "--wait", f"--output={printed}", "train.sbatch"], cwd=folder, env=env)
    with job:
        try:
            wait_for_text(printed, "round 3\n")
            subprocess.run(["scontrol", "requeue", "1"], env=env, check=True)
            assert job.wait(200) == 0, printed.read_text()
        except BaseException:
            job.kill()
            subprocess.run(["scancel", "1"], env=env, check=False)
            raise
    begun = [int(round_) for round_ in re.findall(r"begin (\d+)$", printed.read_text(), re.MULTILINE)]
    assert len(begun) == 4
    assert begun[:2] == [0, 0]
    assert min(begun[2:]) >= 3
    check_results(printed.read_text())
