"""Checks of Python, its packages, this machine and the settings."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ps_protocol.environment import PREFIX, SettingsError, check_environment, read_settings_file

from .finding import Finding

MIN_PYTHON = (3, 11)
NEWEST_TESTED_PYTHON = (3, 13)
MIN_MEMORY_BYTES = 2 << 30  # four processes with torch, and a small model
MIN_SHARED_MEMORY_BYTES = 256 << 20
MIN_OPEN_FILES = 1024
MIN_FREE_SHARE = 0.1  # as the alert has it
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


def check_python() -> Finding:
    """Whether this interpreter is supported."""
    version = sys.version_info[:2]
    detail = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}, {sys.executable}"
    wanted = ".".join(map(str, MIN_PYTHON))
    if version < MIN_PYTHON:
        return Finding("python", "broken", detail, f"install Python {wanted} or newer")
    if version > NEWEST_TESTED_PYTHON:
        return Finding("python", "warning", detail, "Gradpost has not been tested with so new a Python")
    return Finding("python", "ok", detail)


def check_packages() -> Finding:
    """Whether everything that Gradpost declares is installed, in a version that fits."""
    try:
        requirements = metadata.requires("gradpost") or []
    except metadata.PackageNotFoundError:
        return Finding(
            "packages",
            "warning",
            "gradpost itself is not installed",
            "run: pip install gradpost (or: pip install -e .)",
        )
    problems = [problem for requirement in requirements if (problem := _unmet(requirement))]
    if problems:
        return Finding("packages", "broken", "; ".join(problems), "run: pip install --upgrade gradpost")
    versions = [f"{name} {metadata.version(name)}" for name in ("gradpost", "fastapi", "uvicorn", "httpx", "hpack")]
    return Finding("packages", "ok", ", ".join(versions))


def _unmet(requirement: str) -> str | None:
    """Say what is wrong with an installed requirement such as `hpack<5,>=4.1`; None for one of an extra."""
    if "extra ==" in requirement:
        return None
    name, specifiers = re.fullmatch(r"([A-Za-z0-9_.-]+)(.*?)(?:;.*)?", requirement).groups()  # type: ignore[union-attr]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed"
    for operator, bound in re.findall(r"(>=|<)([0-9.]+)", specifiers):
        if (_release(version) < _release(bound)) == (operator == ">="):
            return f"{name} {version} is installed, {specifiers.strip()} is needed"
    return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without trailing zeros: 2.13.0+cpu is (2, 13)."""
    numbers = [int(n) for n in re.match(r"[0-9.]*[0-9]", version).group().split(".")]  # type: ignore[union-attr]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_memory() -> Finding:
    """Whether a small cluster fits."""
    limits = list(_memory_limits())
    if not limits:
        return Finding("memory", "skipped", "this system does not say")
    available, what = min(limits)
    detail = f"{available / 1e9:.1f} GB {what}, {os.cpu_count()} cores"
    shared = Path("/dev/shm")
    if available < MIN_MEMORY_BYTES:
        return Finding(
            "memory",
            "warning",
            detail,
            "start fewer processes here, or give it more memory",
            "each process takes about 0.3 GB besides the model; a pserver also its slots",
        )
    if shared.is_dir():
        status = os.statvfs(shared)
        size = status.f_frsize * status.f_blocks
        if size < MIN_SHARED_MEMORY_BYTES:
            return Finding(
                "memory", "warning", f"{detail}; /dev/shm has {size / 1e6:.0f} MB",
                "give a container --shm-size=1g", "data loaders with workers pass batches through it",
            )  # fmt: skip
    return Finding("memory", "ok", detail)


def _memory_limits() -> Iterator[tuple[int, str]]:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (match := re.search(r"MemAvailable:\s+([0-9]+) kB", meminfo.read_text())):
        yield int(match[1]) * 1024, "available"
    if _CGROUP_MEMORY.exists() and (text := _CGROUP_MEMORY.read_text().strip()).isdecimal():
        yield int(text), "allowed by the container"


def check_disk() -> Finding:
    """Whether there is room where services on this machine keep their state."""
    path = Path(os.environ.get(f"{PREFIX}STATE_DIR") or ".").absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    usage = shutil.disk_usage(folder)
    detail = f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.0f} GB are free in {folder}"
    if usage.free < MIN_FREE_SHARE * usage.total:
        advice = "make room, or keep the state elsewhere: --state-dir or GRADPOST_STATE_DIR"
        return Finding("disk", "warning", detail, advice, "rounds wait while a service here cannot write its log")
    return Finding("disk", "ok", detail)


def check_open_files() -> Finding:
    """Whether a coordinator could hold all its connections."""
    try:
        import resource
    except ImportError:
        return Finding("open files", "skipped", "this system does not say")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES
    detail = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    return Finding("open files", "warning", detail, f"run: ulimit -n {4 * MIN_OPEN_FILES}") if is_low else Finding(
        "open files", "ok", detail
    )  # fmt: skip


def check_allocator() -> Finding:
    """Whether large buffers are kept, which doubles the speed of bulk requests."""
    library, version = platform.libc_ver()
    preloaded = [name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in os.environ.get("LD_PRELOAD", "")]
    if preloaded:
        return Finding("allocator", "ok", f"{preloaded[0]}, which keeps large buffers by itself")
    if library == "glibc":
        return Finding("allocator", "ok", f"glibc {version}; services keep buffers below 1 GiB")
    return Finding(
        "allocator", "warning", library or "not glibc", "requests of tensors may be half as fast as with glibc"
    )


def check_settings() -> Finding:
    """Whether all settings in the environment and the file are known."""
    try:
        check_environment(os.environ)
        file = read_settings_file(os.environ)
    except SettingsError as error:
        return Finding("settings", "broken", str(error), "unset it, or write it as suggested")
    found = sorted(name for name in os.environ if name.startswith(PREFIX)) + [f"{key} in the file" for key in file]
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "")
    if world_size and not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        return Finding(
            "settings", "broken", f"RANK={rank} WORLD_SIZE={world_size}", "ranks go from 0 to WORLD_SIZE - 1"
        )
    return Finding("settings", "ok", ", ".join(found) or "no GRADPOST_* variable is set")
