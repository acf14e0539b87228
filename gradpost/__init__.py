"""Train a PyTorch model on a parameter server over HTTP. These are the public names for training scripts.

    import gradpost

    session = gradpost.connect()  # rank and world size
    optimizer = gradpost.RemoteOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model)

Every error that Gradpost raises derives from `gradpost.GradpostError` and has a stable `code`. The names that
need torch are imported on first use, so that the command line starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ps_protocol import errors
from ps_protocol.errors import *  # noqa: F403

if TYPE_CHECKING:
    from trainer_client.optimizer.remote_optimizer import RemoteOptimizer, wrap_optimizers
    from trainer_client.session.session import Session, connect

__all__ = ["RemoteOptimizer", "Session", "connect", "wrap_optimizers"]
__all__ += errors.__all__
_HOMES = {
    "RemoteOptimizer": "trainer_client.optimizer.remote_optimizer",
    "Session": "trainer_client.session.session",
    "connect": "trainer_client.session.session",
    "wrap_optimizers": "trainer_client.optimizer.remote_optimizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
