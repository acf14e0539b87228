from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from gradpost import doctor, status
from gradpost.doctor import local, network, probes
from gradpost.doctor.finding import Finding
from ps_protocol.environment import PREFIX
from ps_protocol.routes import STATUS
from ps_protocol.vocabulary import PROTOCOL_VERSION

from .canned import serving
from .conftest import RunCommand, run_process
from .test_status import STATE

NAMES = [
    "python", "packages", "torch", "memory", "disk", "open files", "allocator", "settings", "proxies", "loopback",
    "port", "http/2", "coordinator",
]  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = {name for proxy in network._PROXIES for name in (proxy, proxy.lower())}
    for name in list(os.environ):
        if name.startswith(PREFIX) or name in proxies | {"NO_PROXY", "no_proxy", "LD_PRELOAD", "RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name)


def test_this_machine_is_well() -> None:
    """Every check for real, torch and HTTP/2 included."""
    outcome = run_process("-m", "gradpost", "doctor", "--json", OMP_NUM_THREADS="1")
    answer = json.loads(outcome.stdout)
    findings = {finding["check"]: finding for finding in answer["checks"]}
    assert list(findings)[: len(NAMES)] == NAMES  # and more, if a cluster happens to be at the usual address
    assert answer["ok"], outcome.stdout
    assert outcome.exit_code == 0
    assert findings["http/2"]["detail"].startswith("HTTP/2, 32 MB at ")
    assert ", 1 threads, " in findings["torch"]["detail"]
    assert findings["coordinator"]["level"] in ("skipped", "ok")


def fixed(finding: Finding) -> Callable[[], Finding]:
    return lambda: finding


def check_stumbling() -> Finding:
    raise ZeroDivisionError("x")


def run_doctor(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, *checks: Callable[[], Finding], option: str = ""
) -> tuple[int | str | None, str]:
    monkeypatch.setattr(doctor, "CHECKS", checks)
    monkeypatch.setattr(probes, "start_all", lambda: None)
    monkeypatch.setattr(network, "check_coordinator", lambda *_: (Finding("c", "skipped", "none"), None))
    outcome = run_command("doctor", *option.split())
    assert outcome.stderr == ""
    return outcome.exit_code, outcome.stdout


def test_warnings_are_no_failure_unless_strict(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (fixed(Finding("a", "ok", "fine")), fixed(Finding("longer", "warning", "few\x1b", "do [this]", "or that")))
    code, shown = run_doctor(run_command, monkeypatch, *checks)
    assert code == 0
    assert shown.splitlines() == [
        "ok      a       fine",
        "warning longer  few\\x1b",
        "                or that",
        "                -> do [this]",
        "-       c       none",
        "",
        "all is well, with 1 warning",
    ]
    assert run_doctor(run_command, monkeypatch, *checks, option="--strict")[0] == 1


def test_what_is_broken_is_a_failure(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = run_doctor(run_command, monkeypatch, fixed(Finding("a", "broken", "gone")), check_stumbling)
    assert code == 1
    assert shown.splitlines() == [
        "BROKEN  a          gone",
        "BROKEN  stumbling  this check failed itself: ZeroDivisionError('x')",
        "                   -> please report it",
        "-       c          none",
        "",
        "2 checks failed",
    ]
    code, shown = run_doctor(run_command, monkeypatch, fixed(Finding("a", "broken", "gone")), option="--json")
    assert code == 1
    assert json.loads(shown) == {
        "ok": False,
        "checks": [
            {"check": "a", "level": "broken", "detail": "gone", "advice": "", "why": ""},
            {"check": "c", "level": "skipped", "detail": "none", "advice": "", "why": ""},
        ],
        "links": [],
    }


# ---------------------------------------------------------------------- local checks


@pytest.mark.parametrize(("version", "level"), [((3, 10, 1), "broken"), ((3, 12, 1), "ok"), ((3, 99, 0), "warning")])
def test_python(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], level: str) -> None:
    monkeypatch.setattr(local.sys, "version_info", version)
    assert local.check_python().level == level


@pytest.mark.parametrize(
    ("requirement", "version", "problem"),
    [
        ("hpack<5,>=4.1", "4.1.7", None),
        ("hpack<5,>=4.1", "5.0.0", "hpack 5.0.0 is installed, <5,>=4.1 is needed"),
        ("hpack<5,>=4.1", "4.0.9", "hpack 4.0.9 is installed, <5,>=4.1 is needed"),
        ("torch>=2.11", "2.11.0+cpu", None),
        ("torch>=2.11", "2.9.1", "torch 2.9.1 is installed, >=2.11 is needed"),
        ("torch>=2.11", "2.11.0rc1", None),
        ("torch>=2.11", None, "torch is not installed"),
        ('ruff>=0.9; extra == "dev"', None, None),
        ('x>=1; python_version < "4"', "1", None),
    ],
)
def test_packages(monkeypatch: pytest.MonkeyPatch, requirement: str, version: str | None, problem: str | None) -> None:
    def installed(name: str) -> str:
        if version is None and name in requirement:
            raise metadata.PackageNotFoundError(name)
        return (version if name in requirement else None) or "1"

    monkeypatch.setattr(metadata, "requires", lambda _: [requirement])
    monkeypatch.setattr(metadata, "version", installed)
    finding = local.check_packages()
    assert finding.level == ("broken" if problem else "ok")
    assert not problem or finding.detail == problem


def test_packages_of_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert local.check_packages().level == "warning"


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(local, "_CGROUP_MEMORY", limit)
    limit.write_text("max\n")
    assert local.check_memory().level in ("ok", "warning", "skipped")
    limit.write_text("1000000000\n")
    finding = local.check_memory()
    assert (finding.level, finding.detail[:30]) == ("warning", "1.0 GB allowed by the containe")


def test_open_files() -> None:
    script = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (512, 512)); from gradpost.doctor import local;"
        "print(local.check_open_files())"
    )
    assert "level='warning', detail='at most 512', advice='run: ulimit -n 4096'" in run_process("-c", script).stdout


def test_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert local.check_allocator().level == "ok"
    monkeypatch.setattr(local.platform, "libc_ver", lambda: ("", ""))
    assert local.check_allocator().level == "warning"
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert local.check_allocator().detail.startswith("jemalloc")


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.check_settings().level == "ok"
    monkeypatch.setenv("GRADPOST_COORDINATR", "x")
    finding = local.check_settings()
    assert (finding.level, "did you mean GRADPOST_COORDINATOR?" in finding.detail) == ("broken", True)
    monkeypatch.delenv("GRADPOST_COORDINATR")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert local.check_settings().level == "broken"
    monkeypatch.setenv("RANK", "1")
    assert local.check_settings().level == "ok"


# ---------------------------------------------------------------------- network


def test_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.check_loopback().level == "ok"

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert network.check_loopback().level == "broken"


def test_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("GRADPOST_PORT", str(port))
    assert network.check_port() == Finding("port", "ok", f"{port} is free")
    with serving({}) as url:
        monkeypatch.setenv("GRADPOST_PORT", url.rpartition(":")[2])
        finding = network.check_port()
        assert (finding.level, finding.detail.endswith("address already in use")) == ("warning", True)
    with serving({STATUS: STATE.model_dump_json()}) as url:
        monkeypatch.setenv("GRADPOST_PORT", url.rpartition(":")[2])
        finding = network.check_port()
        assert (finding.level, finding.detail.endswith("the coordinator of run 5f0c serves there")) == ("ok", True)
    monkeypatch.setenv("GRADPOST_PORT", "many")
    assert network.check_port().level == "broken"


def test_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.check_proxies().level == "ok"
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("GRADPOST_COORDINATOR", "http://c.example:7070")
    finding = network.check_proxies()
    assert (finding.level, finding.detail) == ("warning", "https_proxy; Gradpost itself goes past them")
    assert finding.advice == "for curl and the like: export NO_PROXY=127.0.0.1,localhost,c.example"
    monkeypatch.setenv("NO_PROXY", "localhost, c.example")
    assert network.check_proxies().level == "ok"


def test_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "DEFAULT_COORDINATOR", "http://127.0.0.1:1")
    finding, found = network.check_coordinator()
    assert (finding.level, found) == ("skipped", None)
    monkeypatch.setenv("GRADPOST_COORDINATOR", "http://127.0.0.1:1")
    finding, found = network.check_coordinator()
    assert (finding.level, "nobody answers at http://127.0.0.1:1" in finding.detail, found) == ("broken", True, None)
    for version, level in ((PROTOCOL_VERSION, "ok"), (PROTOCOL_VERSION + 1, "broken")):
        openapi = json.dumps({"info": {"version": str(version)}})
        with serving({STATUS: STATE.model_dump_json(), "/openapi.json": openapi}) as url:
            finding, found = network.check_coordinator(url)
            assert (finding.level, found is not None) == (level, level == "ok")
    with serving({STATUS: STATE.model_dump_json(), "/openapi.json": "[]"}) as url:
        assert network.check_coordinator(url)[0].detail.endswith(
            "answered something else; is it Gradpost, and of this version?"
        )
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", "/nowhere.toml")
    monkeypatch.delenv("GRADPOST_COORDINATOR")
    assert network.check_coordinator()[0].level == "skipped"  # check_settings says what is wrong


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADPOST_STATE_DIR", str(tmp_path / "not" / "yet"))
    assert f" are free in {tmp_path}" in local.check_disk().detail
    monkeypatch.setattr(local, "MIN_FREE_SHARE", 1.1)
    assert local.check_disk().level == "warning"


# ---------------------------------------------------------------------- probes


def probe(monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    monkeypatch.setitem(probes._running, name, process)


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, "torch", "raise ImportError('libgomp.so.1: no such file')")
    finding = probes.check_torch()
    assert (finding.level, finding.detail) == ("broken", "ImportError: libgomp.so.1: no such file")


def test_a_probe_that_crashes_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, "http2", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    finding = probes.check_http2()
    assert (finding.level, finding.detail) == ("broken", "the probe was ended by SIGILL")


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT_SECONDS", 0.2)
    probe(monkeypatch, "http2", "import time; time.sleep(600)")
    assert probes.check_http2().detail == "no answer within 0.2 s"


def test_http1_is_not_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"version": "HTTP/1.1", "megabytes": 32, "megabytes_per_second": 9}
    probe(monkeypatch, "http2", f"print('a log line'); print({json.dumps(json.dumps(answer))})")
    assert probes.check_http2().level == "broken"


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    answer = {"version": "2.13.0", "threads": 8, "device": "AVX2", "seconds": 1.5}
    probe(monkeypatch, "torch", f"print({json.dumps(json.dumps(answer))})")
    finding = probes.check_torch()
    assert (finding.level, "OMP_NUM_THREADS" in finding.advice) == ("ok", True)
    assert finding.detail == "2.13.0, 8 threads, AVX2, imported in 1.5 s"
