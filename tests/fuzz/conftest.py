"""The carrier fixture of the cluster tests."""

from __future__ import annotations

from ..cluster.conftest import carrier

__all__ = ["carrier"]
