"""Services started by hand with `gradpost serve`, looked at with `gradpost status`; the wheel; nothing is unpickled."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ps_protocol.errors import Unreachable
from trainer_client.inspection import ClusterView
from trainer_client.testing import Child, LocalCluster
from trainer_client.testing.local_cluster import find_our_packages

from ..unit.cli.conftest import RunCommand, run_command  # noqa: F401 - a fixture
from .faulty_run import SCRIPT
from .trainer_processes import free_port
from .up_support import ROOT, clean_environment, wait_until

pytestmark = pytest.mark.cluster
GRADPOST = [sys.executable, "-P", "-m", "gradpost"]


def environment(**more: str) -> dict[str, str]:
    return find_our_packages({**clean_environment(), **more}, first=True)


@contextmanager
def running(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*GRADPOST, *arguments], env=environment(**environ), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_waiting_for(view: ClusterView, *names: str) -> bool:
    try:
        return view.status().waiting_for == names
    except Unreachable:
        return False


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services keep their state in the folder in which they are started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_cluster_by_hand(port: int, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A script finds the cluster by GRADPOST_COORDINATOR, and all services exit when the run is over."""
    url = f"http://127.0.0.1:{port}"
    with (
        running("serve", "pserver", "--exit-when-done", GRADPOST_COORDINATOR=url) as pserver,  # it waits for the other
        running("serve", "coordinator", "--port", str(port), "--lease-seconds", "3", "--exit-when-done") as coordinator,
    ):
        with ClusterView(url) as view:
            assert wait_until(lambda: is_waiting_for(view, "trainer 0"), seconds=60)
        environ = environment(GRADPOST_COORDINATOR=url, RANK="0")
        monkeypatch.setenv("GRADPOST_COORDINATOR", url)
        shown = run_command("status")
        assert "gathering, mode sync, round 0\nwaiting for trainer 0\n" in shown.stdout
        assert "\n0 of 1   http://127.0.0.1:" in shown.stdout
        script = Child("trainer 0", [sys.executable, str(SCRIPT), "1"], env=environ, on_line=lambda *_: None)
        assert script.wait(100) == 0
        assert [process.wait(30) for process in (coordinator, pserver)] == [0, 0]


INSTALLED = """
import torch, trainer_client, ps_protocol, sys
from trainer_client import RemoteOptimizer
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
from services.coordinator.dashboard import routes
assert sys.prefix in routes.__file__, routes.__file__
page = routes.read_page(wants_token=False).body.decode()
assert "<template id=" in page, "the chart library is another one"
names = [part.split('"')[0] for part in page.split('"dashboard/')[1:]]
assert len(names) >= 4 and all(routes.read_file(name).body for name in [*names, routes.CHARTS])
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


# torch imports the module pickle; what counts is that no process looks up a class that a pickle names.
WATCH = """
import os, sys

def watch(event, arguments):
    if event == "pickle.find_class":
        os.write(2, f"unpickled {arguments}\\n".encode())
        os._exit(99)

sys.addaudithook(watch)
with open(os.path.join(os.environ["WATCHED"], str(os.getpid())), "w") as file:
    file.write(" ".join(sys.orig_argv))
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    (tmp_path / "watched").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WATCHED", str(tmp_path / "watched"))
    return tmp_path


@pytest.mark.extended
def test_nothing_is_unpickled(environ: Path) -> None:
    with LocalCluster(pservers=1, trainers=1, local_transport=False, exit_when_done=True) as cluster:
        assert cluster.run_trainers([sys.executable, str(SCRIPT), "2"]) == [0], list(cluster.output)
        assert [service.wait(30) for service in cluster.services] == [0, 0], list(cluster.output)
        pids = {str(child.pid) for child in (*cluster.services, *cluster.trainers)}
    assert pids <= {file.name for file in (environ / "watched").iterdir()}
    assert not [line for line in cluster.output if "unpickled" in line]


@pytest.mark.extended
def test_it_would_be_noticed(environ: Path) -> None:
    script = "import collections, pickle; pickle.loads(pickle.dumps(collections.OrderedDict()))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr[:9]) == (99, "unpickled")
