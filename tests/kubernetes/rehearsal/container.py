"""A pod's container without an engine: an image of this machine's files with the pod's volumes.

As in deploy/docker/Dockerfile, `python3` and `gradpost` are on the path, and the examples at the same place. They are
those of this checkout and of the Python that runs the tests.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = 10001
ROOT = Path(__file__).parents[3]
ENVIRON = {
    "PATH": "/opt/gradpost/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "HOME": "/nonexistent",
}
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "sys", "dev")
_AS_USER = (
    f"setpriv --reuid {USER} --regid {USER} --groups {USER} --bounding-set=-all --inh-caps=-all --no-new-privs"
).split()


def make_image(folder: Path) -> None:
    """Write the programs that this machine lacks."""
    bin_ = folder / "bin"
    bin_.mkdir(parents=True)
    for name, command in (("python3", ""), ("gradpost", "-P -m gradpost")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        (bin_ / name).chmod(0o755)


def command_in(root: Path, image: Path, mounts: Mapping[str, Path], hosts: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` in a new mount namespace with a read-only root and without privileges.

    The started process becomes that of `command`. `root` is an empty folder.
    """
    script = ["set -e", f"mount -t tmpfs -o mode=755 image {root}"]
    for name in _SYSTEM:
        path = Path("/") / name
        if path.is_symlink():
            script.append(f"ln -s {os.readlink(path)} {root}/{name}")
        elif path.exists():
            script += _bind(path, f"{root}/{name}")
    for target, source in sorted(mounts.items()):
        script += _bind(source, f"{root}{target}")
    for path in {str(ROOT), sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}:
        if not path.startswith("/usr"):
            script += _bind(Path(path), f"{root}{path}")
    script += _bind(image / "bin", f"{root}/opt/gradpost/bin")
    script += _bind(ROOT / "examples", f"{root}/opt/gradpost/examples")
    script.append(f"mount --bind {hosts} {root}/etc/hosts")
    script.append(f"mount -o remount,ro {root}")
    script.append(f"cd / && exec chroot {root} {shlex.join([*_AS_USER, *command])}")
    return ["unshare", "--mount", "sh", "-c", "\n".join(script)]


def command_beside(pid: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` in the container of a process, as the kubelet's exec probes do."""
    return ["nsenter", "--target", str(pid), "--mount", "--net", "--root", *_AS_USER, *command]


def _bind(source: Path, target: str) -> list[str]:
    return [f"mkdir -p {target}", f"mount --rbind {source} {target}"]
