"""Looking at a cluster through its plain HTTP API."""

from __future__ import annotations

from typing import Any

import httpx


def read_bytes(url: str) -> bytes:
    return httpx.get(url, trust_env=False, timeout=30).raise_for_status().content


def read_json(url: str) -> Any:
    return httpx.get(url, trust_env=False, timeout=30).raise_for_status().json()
