"""Volumes as folders, with the owners and modes that Kubernetes gives them for a pod with an `fsGroup`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import trustme

from ..rendering import Object
from .container import USER

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
