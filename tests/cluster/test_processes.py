"""Child processes and their guardian; the wheel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import threading
import venv
from pathlib import Path

import pytest

from trainer_client.testing import Child
from trainer_client.testing.guardian import Guardian
from trainer_client.testing.processes import find_our_packages

from ..unit.cli.conftest import RunCommand, run_command  # noqa: F401 - a fixture
from .up_support import ROOT, wait_until

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


GRANDCHILD = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
    "print(p.pid, flush=True);"
)


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


def test_nothing_outlives_a_killed_parent() -> None:
    stubborn = f"import signal; signal.signal(15, signal.SIG_IGN); {GRANDCHILD} import time; time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(script=stubborn)],
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


# ---------------------------------------------------------------------- the wheel

INSTALLED = """
import torch, trainer_client, ps_protocol, sys
from gradpost import RemoteOptimizer
assert sys.prefix in trainer_client.__file__ and sys.prefix in ps_protocol.__file__, trainer_client.__file__
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
"""
PAGE = """
import sys
from services.coordinator import pages
assert sys.prefix in pages.__file__, pages.__file__
page = pages.read_page(wants_token=False).body.decode()
assert "<template id=" in page, "the chart library is another one"
names = [part.split('"')[0] for part in page.split('"dashboard/')[1:]]
assert len(names) >= 4 and all(pages.read_file(name).body for name in [*names, pages.CHARTS])
"""


def run_checked(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.extended
def test_the_wheel_trains_outside_the_checkout(tmp_path: Path) -> None:
    run_checked([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)])
    [wheel] = tmp_path.glob("gradpost-*.whl")
    prefix = tmp_path / "env"
    venv.create(prefix, with_pip=False)
    # The dependencies are those of this environment; its .pth files, and so the editable checkout, are not read.
    site_packages = prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin" / "python"), "install"]
    run_checked([*pip, "--no-deps", "--no-index", "--quiet", str(wheel)])
    script = tmp_path / "train.py"
    script.write_text(INSTALLED)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run_checked([str(prefix / "bin" / "python"), "-P", "-c", PAGE], cwd=tmp_path, env=environment)
    command = [str(prefix / "bin" / "gradpost"), "up", "--pservers", "2", "--trainers", "1", "--", "python", "train.py"]
    done = run_checked(command, cwd=tmp_path, env=environment)
    assert done.stdout.splitlines()[-1].startswith("trained: mode=sync transport=HTTP/2 rounds=3 ")
