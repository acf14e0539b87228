"""A local cluster whose network, clocks and code can be disturbed."""

from __future__ import annotations

import contextlib
import io
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from gradpost.tokens import create_tokens
from gradpost.up.standbys import Standbys
from ps_config.control_client import BearerAuth
from ps_config.tokens import TokenPair
from trainer_client.testing import Child, LocalCluster

from .proxy import Proxy
from .setup import Setup

RETRY_SECONDS = 60.0  # the default, which now counts for joining, too: coordinators may die one after another
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("trainer.py")
_FAKETIME = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/*/lib/faketime/libfaketimeMT.so.1")


def find_libfaketime() -> Path | None:
    """Return the library that makes clocks jump (Debian's package libfaketime), if it is installed."""
    return next((path for pattern in _FAKETIME for path in Path("/").glob(pattern[1:])), None)


@contextlib.contextmanager
def stopped(child: Child) -> Iterator[None]:
    """Stop a process within the block."""
    child.signal(signal.SIGSTOP)
    yield
    child.signal(signal.SIGCONT)


class ChaosCluster(LocalCluster):
    """A local cluster with a proxy before each service.

    A pserver that is started again has its former address, but not in a cluster with standbys, whose services require
    tokens. The folder has the files of services and trainers.
    """

    def __init__(self, setup: Setup, folder: Path, *, sabotage: str | None, **arguments: Any) -> None:
        self._tokens = folder / "tokens"
        self.rotate_tokens()
        if setup.num_standbys:
            arguments["tokens_dir"] = self._tokens
        super().__init__(
            pservers=setup.num_pservers,
            trainers=setup.num_trainers,
            state_dir=folder / "state",
            environ={
                **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "CHAOS_SABOTAGE": sabotage or "",
            },
            **setup.settings,
            **arguments,
        )
        self.setup = setup
        self.folder = folder
        self.proxies: dict[Child, Proxy] = {}  # of pservers and standbys
        self._behind: dict[Proxy, Child] = {}
        self._roles = threading.RLock()  # held while a process becomes a pserver
        self.coordinator_proxy = Proxy(self.name_client, lambda: int(self.address.rpartition(":")[2]))
        self.lives = [0] * setup.num_trainers
        self._token_links: dict[Child, Path] = {}  # of services, to the folder of tokens
        self._faketime = find_libfaketime() if setup.fakes_time else None

    def stop(self, grace_seconds: float = 10.0) -> dict[str, int]:
        """See LocalCluster."""
        codes = super().stop(grace_seconds)
        for proxy in {*self.proxies.values(), self.coordinator_proxy}:
            proxy.close()
        return codes

    def environment(self) -> dict[str, str]:
        """See LocalCluster. Trainers and pservers reach the coordinator through its proxy."""
        env = super().environment()
        if self.address:
            env["GRADPOST_COORDINATOR"] = self.coordinator_proxy.address
        return env

    def restart_coordinator(self, **env: Any) -> Child:
        """Start the coordinator again at its address, without waiting until it serves: it may die before."""
        self._coordinator = self._spawn_service(
            "coordinator",
            "services.coordinator",
            GRADPOST_PORT=self.address.rpartition(":")[2],
            GRADPOST_NUM_PSERVERS=self.num_pservers,
            GRADPOST_NUM_TRAINERS=self.num_trainers,
            **env,
        )
        return self._coordinator

    def start_rank(self, rank: int) -> Child:
        """Start another incarnation of a trainer."""
        self.lives[rank] += 1
        command = [sys.executable, "-P", str(SCRIPT), str(self.folder), str(self.lives[rank])]
        return self.start_trainer(rank, command, {"GRADPOST_RETRY_SECONDS": str(RETRY_SECONDS)})

    def start_rival(self, index: int) -> Child:
        """Start a second process for a running pserver."""
        return self._spawn_service(f"rival of pserver {index}", "services.pserver", GRADPOST_PSERVER_INDEX=str(index))

    def clock_file(self, name: str) -> Path:
        """Return the file with the offset of a process's wall clock, in seconds with a sign."""
        return self.folder / f"clock of {name}"

    def connect(self, *, seconds: float, address: str = "") -> httpx.Client:
        """Return a client of a service, by default the coordinator, with the token of an administrator."""
        auth = BearerAuth(TokenPair(self._tokens / "admin"))
        return httpx.Client(base_url=address or self.address, auth=auth, timeout=seconds, trust_env=False)

    def rotate_tokens(self) -> None:
        """Replace the tokens of all processes; the ones before stay valid until the next rotation."""
        with contextlib.redirect_stdout(io.StringIO()):
            create_tokens(self._tokens, rotate=True)

    @contextlib.contextmanager
    def keep_tokens(self, child: Child) -> Iterator[None]:
        """Let a service keep its current tokens, whatever the others have, as long as this context lasts."""
        kept = Path(tempfile.mkdtemp(prefix="tokens-", dir=self.folder))
        shutil.copytree(self._tokens, kept, dirs_exist_ok=True)
        _link(self._token_links[child], kept)
        yield
        _link(self._token_links[child], self._tokens)

    def place_file(self, name: str) -> Path:
        """Return the file that says what a service's place of checkpoints does: see `service.py`."""
        return self.folder / f"place of {name}"

    def log_file(self, child: Child) -> Path:
        """Return the file that says what the log of a pserver or standby does: see `service.py`."""
        return self.folder / f"log of {child.pid}"

    def name_client(self, port: int) -> str:
        """Return the process with a connection from this port as `name_process` does, or "another"."""
        for child in [*self.trainers, *([*self.services, *self.standbys] if self.setup.num_standbys else [])]:
            with contextlib.suppress(psutil.Error):  # it has just ended
                if any(one.laddr.port == port for one in psutil.Process(child.pid).net_connections("tcp")):
                    return self.name_process(child)
        return "another"

    def name_process(self, child: Child) -> str:
        """Return the name of a trainer, or a name with the id of another process, whose role may change."""
        return child.name if child in self.trainers else f"process {child.pid}"

    def find_port(self, proxy: Proxy) -> int:
        """Return the port at which the process behind a proxy listens; 0 while it does not."""
        with contextlib.suppress(psutil.Error, KeyError):
            for one in psutil.Process(self._behind[proxy].pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    return int(one.laddr.port)
        return 0

    def find_folder(self, child: Child) -> Path | None:
        """Return the folder that a pserver or standby has locked, if any."""
        with contextlib.suppress(psutil.Error):
            for file in psutil.Process(child.pid).open_files():
                if file.path.endswith("/lock"):
                    return Path(file.path).parent
        return None

    def start_pserver(self, index: int, **env: Any) -> Child:
        """See LocalCluster. A standby that was promoted meanwhile counts as a standby until the next check."""
        with self._roles:
            former = self.pservers[index] if index < len(self.pservers) else None
            child = super().start_pserver(index, **env)
            if former is not None and former.is_running:
                self.standbys.append(former)
                self.follows[former] = index
            return child

    def exchange(self, index: int, standby: Child) -> None:
        """See LocalCluster."""
        with self._roles:
            super().exchange(index, standby)

    def _spawn_service(self, name: str, module: str, *, pass_fds: Sequence[int] = (), **env: Any) -> Child:
        proxy = self._choose_proxy(name) if name.startswith(("pserver", "standby")) else None
        if proxy is not None:
            env["GRADPOST_ADVERTISE_ADDRESS"] = proxy.address
        place = self.place_file(name.removeprefix("standby of "))
        place.touch()
        env |= {"CHAOS_SERVICE": module, "CHAOS_PLACE": place, "CHAOS_LOG": self.folder / "log"}
        env["CHAOS_FAILPOINTS"] = self.folder / "failpoints"
        if self.setup.num_standbys:
            env["GRADPOST_TOKENS_DIR"] = link = self.folder / f"tokens-{secrets.token_hex(4)}"
            _link(link, self._tokens)
        env = {key: str(value) for key, value in env.items()} | self._clock_of(name)
        child = super()._spawn_service(name, "tests.chaos.service", pass_fds=pass_fds, **env)
        if self.setup.num_standbys:
            self._token_links[child] = link
        if proxy is not None:
            self.proxies[child], self._behind[proxy] = proxy, child
        return child

    def _choose_proxy(self, name: str) -> Proxy:
        index = int(name.split()[-1])
        if index < len(self.pservers) and not self.setup.num_standbys:
            return self.proxies[self.pservers[index]]
        proxy = Proxy(self.name_client, lambda: self.find_port(proxy))
        return proxy

    def _clock_of(self, name: str) -> dict[str, str]:
        # Not for trainers: under libfaketime 0.9.10 a time.sleep of Python is refused (EINVAL).
        if self._faketime is None:
            return {}
        file = self.clock_file(name)
        if not file.exists():
            file.write_text("+0")
        return {
            "LD_PRELOAD": str(self._faketime),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }


def _link(link: Path, folder: Path) -> None:
    """Let a symbolic link lead to a folder, also if it leads to another one."""
    new = link.with_suffix(".new")
    new.symlink_to(folder)
    new.replace(link)


class ChaosStandbys(Standbys):
    """The standbys of `gradpost up`, which reports about half of the ended processes to the coordinator."""

    def __init__(self, cluster: ChaosCluster, report: Callable[[str], None]) -> None:
        super().__init__(cluster, cluster.setup.num_standbys, report)
        self._chance = random.Random(f"supervisor {cluster.setup.seed}")

    def _report_end(self, index: int, child: Child) -> None:
        if self._chance.random() < 0.5:
            super()._report_end(index, child)
