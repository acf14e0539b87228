"""The built wheel, installed outside the checkout, trains: nothing is missing from the package."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
SCRIPT = """
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


def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **kwargs)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done  # type: ignore[no-any-return]


def test_the_wheel_trains_outside_the_checkout(tmp_path: Path) -> None:
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)])
    [wheel] = tmp_path.glob("gradpost-*.whl")
    prefix = tmp_path / "env"
    venv.create(prefix, with_pip=False)
    # The dependencies are those of this environment; its .pth files, and so the editable checkout, are not read.
    site_packages = prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin" / "python"), "install"]
    run([*pip, "--no-deps", "--no-index", "--quiet", str(wheel)])
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run([str(prefix / "bin" / "python"), "-P", "-c", PAGE], cwd=tmp_path, env=environment)
    command = [str(prefix / "bin" / "gradpost"), "up", "--pservers", "2", "--trainers", "1", "--", "python", "train.py"]
    done = run(command, cwd=tmp_path, env=environment)
    assert done.stdout.splitlines()[-1].startswith("trained: mode=sync transport=HTTP/2 rounds=3 ")
