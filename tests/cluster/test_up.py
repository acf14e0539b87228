"""`gradpost up` as its user meets it: output, exit code, and no process left behind, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from ..unit.cli.conftest import RunCommand, run_command  # noqa: F401 - a fixture
from .up_support import IDLE, SECONDS, RunningUp, train_script, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"),
]


def run_up(*arguments: object, folder: Path, cold: bool = False, **environ: str) -> tuple[int, str, str]:
    with RunningUp(*arguments, folder=folder, cold=cold, **environ) as up:
        outcome = up.finish()
        assert up.has_left_nothing(), up.left()
    return outcome


def test_it_trains_and_ends_with_the_numbers(tmp_path: Path) -> None:
    """From a folder whose `services` would break ours, with a setting from the environment."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise ImportError('not yours')")
    script = train_script(tmp_path)
    code, stdout, stderr = run_up("--", "python", script.name, folder=tmp_path, cold=True, GRADPOST_MIN_BLOCK_SIZE="4")
    lines = stdout.splitlines()
    assert code == 0, stdout + stderr
    for rank in range(2):
        assert f"[trainer {rank}] rank {rank} of 2, {sys.executable}" in lines
    line = r"trained: mode=sync transport=HTTP/2 accuracy=0\.5 rounds=5 seconds=[0-9.]+"
    assert re.fullmatch(line, lines[-1])
    rounds, values, _, columns, *shards, _, _ = lines[-8:]
    assert rounds.split() == ["rounds", "seconds", "seconds", "a", "round", "accuracy", "loss"]
    assert values.split()[0] == "5"
    assert columns.split() == ["pserver", "shard", "bytes", "pushed", "bytes", "pulled", "bytes"]
    # 18 elements; blocks of at least 4, so that each pserver has half of the matrix and one of them the bias.
    assert sorted(line.split()[1] for line in shards) == ["32", "40"]
    assert "\x1b" not in stdout + stderr
    assert re.fullmatch(r"gradpost: 2 pservers and 2 trainers; dashboard: http://\S+\n", stderr)


@pytest.mark.extended
def test_a_single_script_has_the_terminal_for_itself(tmp_path: Path) -> None:
    """A debugger works in it, and a progress bar is drawn in place."""
    script = train_script(tmp_path, in_each_round="print('\\rbar', step, end=''); step == 2 and breakpoint()")
    ours, theirs = os.openpty()
    arguments = ("--pservers", 1, "--trainers", 1, "--", "python", script)
    environ = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with RunningUp(*arguments, folder=tmp_path, stdin=theirs, stdout=theirs, cold=True, **environ) as up:
        os.close(theirs)
        os.write(ours, b"p 6 * 7\nc\n")  # waits in the terminal until the debugger reads it
        shown = read_terminal(ours)
        assert up.process.wait(SECONDS) == 0, shown
    assert re.search(r"\rbar 1.*\rbar 2.*\(Pdb\) [^\n]*\s*42\r\n", shown, re.DOTALL)
    assert "[trainer 0]" not in shown
    assert shown.rstrip().splitlines()[-1].startswith("trained: mode=sync")


def read_terminal(fd: int) -> str:
    shown = b""
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # so a terminal reports that no process has it open any more
            chunk = b""
        if not chunk:
            os.close(fd)
            return shown.decode()
        shown += chunk


class Ending(NamedTuple):
    """An ending of `gradpost up`: patterns of stdout and stderr that are there, and that are not."""

    arguments: str
    script: str  # a statement in each round of a script that trains; or a whole script, if it has several lines
    code: int
    shown: tuple[str, ...]
    hidden: tuple[str, ...] = ("Traceback", "run failed")
    rounds: int = 5


KILL = "os.kill(os.getpid(), 9)"
KILLED = r"was ended by SIGKILL \(out of memory\?\)"
WAY_ON = r" \(at round \d+\)\. Continue: \S*gradpost up --resume .*-- python .*\n\Z"
ENDINGS = {
    "a trainer exits with a code while another one goes on": Ending(
        "--pservers 1", "if session.rank == 1 and step == 2: sys.exit(7)", 7,
        (r"^\[trainer 0\] gradpost: trainer 1 failed: its process failed with exit code 7$",
         r"^failed: mode=sync .* rounds=\d",
         rf"^gradpost: trainer 1 failed: its process failed with exit code 7{WAY_ON}"), ("run failed",), 10**6,
    ),
    "a trainer is waited for in vain": Ending(
        "--pservers 1 --round-timeout 3", "if session.rank == 0 and step == 2: time.sleep(600)", 1,
        (rf"^gradpost: trainer 0 did not reach the batch barrier of round 4 .*--round-timeout-seconds .*\){WAY_ON}",),
        ("run failed",),
    ),
    "a killed script is noticed before its lease ends": Ending(
        "--pservers 1 --lease-seconds 1000", f"if session.rank == 1 and step == 2: {KILL}", 128 + 9,
        (rf"^\[trainer 0\] gradpost: trainer 1 failed: its process {KILLED}$",
         rf"^gradpost: trainer 1 failed: its process {KILLED}{WAY_ON}",
         r"^failed: mode=sync transport=HTTP/2 rounds=3 "), ("run failed",),
    ),
    "the others go on without a lost trainer": Ending(
        "--pservers 1 --on-trainer-loss continue", f"if session.rank == 1 and step == 2: {KILL}", 0,
        (rf"^gradpost: trainer 1 was lost: its process {KILLED}\n\Z", r"^trained: .* accuracy=0\.5 rounds=5 "),
    ),
    "a trainer ends before it joins": Ending(
        "--pservers 1", "import os, sys, time, gradpost\nif os.environ['RANK'] == '0': sys.exit()\n"
        "print('joined', gradpost.connect().rank, flush=True)\ntime.sleep(600)", 1,
        (r"^\[trainer 1\] joined 1$", r"^gradpost: nothing was trained: trainer 0 ended before .*\n\Z"),
    ),
    "a trainer fails before it joins": Ending(
        "", "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)", 3,
        (r"^gradpost: trainer 1 failed with exit code 3\n\Z",),
    ),
    "a trainer is refused": Ending(
        "", "import gradpost, os, time\nif os.environ['RANK'] == '0': time.sleep(600)\n"
        "gradpost.connect(world_size=7)", 1,
        (r"^\[trainer 1\] .*Conflict: .*7", r"^gradpost: trainer 1 failed with exit code 1\n\Z"),
        ("run failed",),
    ),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("name", ENDINGS)
def test_it_ends_with_the_code_and_the_reason(tmp_path: Path, name: str) -> None:
    ending = ENDINGS[name]
    script = train_script(tmp_path, rounds=ending.rounds, in_each_round=ending.script)
    if "\n" in ending.script:
        script.write_text(ending.script)
    code, stdout, stderr = run_up(*ending.arguments.split(), "--", "python", script, folder=tmp_path)
    assert code == ending.code, stdout + stderr
    for pattern in ending.shown:
        assert len(re.findall(pattern, stdout + stderr, re.MULTILINE)) == 1, (pattern, stdout + stderr)
    assert not re.search("|".join(ending.hidden), stdout + stderr), stdout + stderr


def test_a_run_that_is_stopped_can_be_continued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_command: RunCommand,  # noqa: F811
) -> None:
    script = train_script(tmp_path, rounds=20000, in_each_round="step == 20 and print('trains', flush=True)")
    monkeypatch.chdir(tmp_path)
    with RunningUp("--pservers", 1, "--trainers", 1, "--", "python", script, folder=tmp_path) as up:
        up.wait_for("[trainer 0] trains")
        assert "; stop the run with: gradpost stop " in run_command("evict", 0).stderr
        done = run_command("stop")
        assert re.fullmatch(r"run \w+ stopped after round \d+\n", done.stdout), done.stderr
        stopped = int(done.stdout.split()[-1])
        code, stdout, stderr = up.finish()
        assert up.has_left_nothing(), up.left()
    assert code == 0, stderr
    assert re.search(rf"^stopped: mode=sync .* rounds={stopped} ", stdout, re.MULTILINE), stdout
    way_on = r"gradpost: an administrator stopped run \w+ \(at round [\d,]+\)\. Continue: \S*gradpost up --resume .*\n"
    assert re.fullmatch(way_on, stderr.splitlines(keepends=True)[-1]), stderr
    assert "[trainer 0] gradpost: an administrator stopped run" in stdout
    assert "run failed" not in stdout
    assert json.loads(run_command("checkpoint", "list", "--json").stdout)[0]["round"] >= 20
    script.write_text(script.read_text().replace("range(20000)", "range(optimizer.round, optimizer.round + 5)"))
    code, stdout, stderr = run_up(
        "--resume", "--json", "--pservers", 1, "--trainers", 1, "--", "python", script, folder=tmp_path
    )
    assert code == 0, stderr
    assert json.loads(stdout)["rounds"] >= stopped + 5


def test_an_interrupt_ends_everything(tmp_path: Path) -> None:
    with RunningUp("--pservers", 1, "--", "python", "-c", IDLE, folder=tmp_path, cold=True) as up:
        up.wait_for("[trainer 0] ready", "[trainer 1] ready")
        num_processes = 1 + 1 + 1 + 1 + 2 * 2  # up, its guardian, two services, two scripts of two processes
        # A process that is just being executed has no environment for a moment.
        assert wait_until(lambda: len(up.left()) == num_processes, seconds=10), up.left()
        started = time.monotonic()
        up.signal(signal.SIGINT)
        assert up.finish()[0] == 130
        assert time.monotonic() - started < 30
        assert up.has_left_nothing(), up.left()


@pytest.mark.extended
def test_it_ends_when_its_output_is_not_read(tmp_path: Path) -> None:
    chatty = "import time\nwhile True: print('line'); time.sleep(0.05)"
    with RunningUp("--pservers", 1, "--trainers", 1, "--", "python", "-c", chatty, folder=tmp_path, cold=True) as up:
        up.wait_for("[trainer 0] line")
        assert up.process.stdout is not None
        up.process.stdout.close()
        assert up.process.wait(SECONDS) == 128 + signal.SIGPIPE
        assert up.has_left_nothing(), up.left()


RESTARTED = """
import os, pathlib, signal, torch
from gradpost import RemoteOptimizer, connect
torch.set_num_threads(1)
session = connect()
data = torch.utils.data.TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(5)))
sampler = torch.utils.data.DistributedSampler(data, session.world_size, session.rank)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-2), model=model)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30)
for epoch, batches in optimizer.epochs(loader, 3, schedule=schedule):
    for (inputs,) in batches:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        schedule.step()
        if KILLS and session.rank == 0 and optimizer.round == 17 and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
if session.rank == 0:
    print("rounds", optimizer.round, [float(value) for value in model.weight.flatten()])
"""


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_killed_trainer_continues_in_its_data(tmp_path: Path) -> None:
    found = []
    for kills in (False, True):
        folder = tmp_path / str(kills)
        folder.mkdir()
        (folder / "train.py").write_text(RESTARTED.replace("KILLS", str(kills)))
        code, stdout, stderr = run_up("--max-restarts", 3, "--", "python", "train.py", folder=folder)
        assert code == 0, stdout + stderr
        found += [line.partition("rounds ")[2] for line in stdout.splitlines() if "rounds 3" in line]
        assert ("continuing run" in stdout + stderr) == kills
    assert found[0].startswith("30 ")
    assert found[0] == found[1]
