"""Child processes, their whole groups, and the guardian that ends them when their parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer_client.testing import Child
from trainer_client.testing.guardian import Guardian
from trainer_client.testing.local_cluster import find_our_packages

from .up_support import wait_until

pytestmark = pytest.mark.cluster


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.has_come = threading.Event()

    def __call__(self, name: str, line: str) -> None:
        assert name == "child"
        self.lines.append(line)
        self.has_come.set()


def start(script: str, lines: Lines, guardian: Guardian | None = None) -> Child:
    return Child("child", [sys.executable, "-c", script], env=dict(os.environ), on_line=lines, guardian=guardian)


def is_gone(pid: int) -> bool:
    """Return whether the process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_lines_as_a_terminal_would_show_them() -> None:
    lines = Lines()
    script = r"""
import sys
sys.stdout.write("out\n\n 10%\r 50%\r100%\r\nhalf")
sys.stdout.flush()
sys.stderr.buffer.write(b" and half \xff\nno newline")
"""
    assert start(script, lines).wait(30) == 0
    assert lines.lines == ["out", "", "100%", "half and half �", "no newline"]


def test_a_line_without_end_is_cut() -> None:
    lines = Lines()
    assert start("print('x' * 200_000, end='')", lines).wait(30) == 0
    assert "".join(lines.lines) == "x" * 200_000
    assert 1 < len(lines.lines) < 8


def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start("raise SystemExit(3)", Lines()).wait(30) == 3
    child = start("import os; os.kill(os.getpid(), 9)", Lines())
    assert child.wait(30) == -9
    assert (child.is_running, child.exit_code) == (False, -9)
    assert repr(child) == f"<Child child [pid {child.pid} | exit code -9]>"
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("the number may be another group's by now"))
    child.signal(signal.SIGTERM)
    assert child.stop() == -9


def test_waiting_has_an_end() -> None:
    child = start("import time; time.sleep(600)", Lines())
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    assert child.is_running
    assert child.stop() == -signal.SIGTERM


GRANDCHILD = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
    "print(p.pid, flush=True);"
)


def test_what_a_child_leaves_behind_ends_with_it() -> None:
    lines = Lines()
    assert start(GRANDCHILD, lines).wait(30) == 0
    assert wait_until(lambda: is_gone(int(lines.lines[0])), seconds=5)


def test_what_ignores_sigterm_is_killed() -> None:
    lines = Lines()
    child = start(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)", lines
    )
    assert lines.has_come.wait(30)
    assert child.stop(grace_seconds=0.2) == -signal.SIGKILL


PARENT = """
import os, sys, time
from trainer_client.testing import Child
from trainer_client.testing.guardian import Guardian
guardian = Guardian()
script = {script!r}
child = Child("child", [sys.executable, "-c", script], env=os.environ, on_line=lambda _, l: print(l, flush=True),
              guardian=guardian)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("prelude", ["", "import signal; signal.signal(15, signal.SIG_IGN);"], ids=["", "stubborn"])
def test_nothing_outlives_a_killed_parent(prelude: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(script=prelude + GRANDCHILD + "import time; time.sleep(600)")],
        env=find_our_packages(os.environ, first=True),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        pids = [int(output.readline()) for _ in range(2)]
        assert not any(map(is_gone, pids))
        parent.kill()
        parent.wait()
    assert wait_until(lambda: all(map(is_gone, pids)), seconds=10)


def test_a_guardian_ends_what_it_still_guards_when_closed() -> None:
    guardian = Guardian()
    ended, forgotten = (
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        for _ in range(2)
    )
    guardian.watch(ended.pid)
    guardian.watch(forgotten.pid)
    guardian.forget(forgotten.pid)
    reaper = threading.Thread(target=ended.wait)  # a zombie's group would be there as long as it is
    reaper.start()
    guardian.close()
    guardian.close()
    reaper.join(10)
    assert ended.returncode == -signal.SIGTERM
    assert forgotten.poll() is None
    forgotten.kill()
    forgotten.wait()


def test_a_guardian_that_was_killed_is_no_reason_to_fail() -> None:
    lines = Lines()
    guardian = Guardian()
    guardian._process.kill()
    guardian._process.wait()
    assert start("print(1)", lines, guardian).wait(30) == 0
    guardian.close()


def test_services_find_our_packages_first_and_scripts_last() -> None:
    find = find_our_packages
    root = str(Path(__file__).parents[2])
    assert find({"PYTHONPATH": "/a:/b"}, first=True) == {"PYTHONPATH": f"{root}:/a:/b"}
    assert find({"PYTHONPATH": "/a:/b"}, first=False) == {"PYTHONPATH": f"/a:/b:{root}"}
    assert find({}, first=False) == {"PYTHONPATH": root}
