"""The server fixture of the cluster tests."""

from __future__ import annotations

from ..cluster.conftest import server

__all__ = ["server"]
