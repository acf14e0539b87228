"""The trainer's side of Gradpost. Training scripts import its public names from `gradpost`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .optimizer.named_optimizers import wrap_optimizers
    from .optimizer.remote_optimizer import RemoteOptimizer
    from .session.session import Session, connect

__all__ = ["RemoteOptimizer", "Session", "connect", "wrap_optimizers"]

# Imported when they are first asked for: `trainer_client.testing` starts clusters, and needs no torch for it.
_HOMES = {
    "RemoteOptimizer": ".optimizer.remote_optimizer",
    "Session": ".session.session",
    "connect": ".session.session",
    "wrap_optimizers": ".optimizer.named_optimizers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
