"""A pod's container without an engine: an image of this machine's files with the pod's volumes.

As in deploy/docker/Dockerfile, `python3` and `gradpost` are on the path, and the examples at the same place. They are
those of this checkout and of the Python that runs the tests.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import trustme

from ..rendering import Object

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


# ------------------------------------------------------------------ volumes
#
# They are folders with the owners and modes that Kubernetes gives them for a pod with an `fsGroup`.

Secrets = dict[str, dict[str, bytes]]  # by name and key


def make_secrets(objects: list[Object]) -> Secrets:
    """Make the Secrets of `gradpost token create` and of cert-manager."""
    made = {"gradpost-tokens": {scope: secrets.token_urlsafe(32).encode() for scope in ("read", "train", "admin")}}
    authority = trustme.CA()
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Certificate" and not spec.get("isCA"):
            issued = authority.issue_cert(*spec["dnsNames"])
            made[spec["secretName"]] = {
                "tls.crt": b"".join(pem.bytes() for pem in issued.cert_chain_pems),
                "tls.key": issued.private_key_pem.bytes(),
                "ca.crt": authority.cert_pem.bytes(),
            }
    return made


def secret_volume(folder: Path, volume: Object, secret: Mapping[str, bytes]) -> Path:
    """Make a folder of links into another one, which is replaced atomically, for root and the pod's group."""
    data = folder / "..2026_11_22"
    data.mkdir(parents=True)
    keys = {item["key"]: item["path"] for item in volume.get("items", [{"key": key, "path": key} for key in secret])}
    for key, path in keys.items():
        (data / path).write_bytes(secret[key])
        (data / path).chmod(volume["defaultMode"] | 0o440)  # the group may read
        os.chown(data / path, 0, USER)
        (folder / path).symlink_to(Path("..data") / path)
    (folder / "..data").symlink_to(data.name)
    for path in (data, folder):
        os.chown(path, 0, USER)
        path.chmod(0o2775 if path == data else 0o3777)
    return folder


def empty_volume(folder: Path) -> Path:
    """Make an emptyDir or a claim, which the pod's group may write to."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, 0, USER)
    folder.chmod(0o2775)
    return folder
