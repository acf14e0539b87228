"""Train a PyTorch model on a Gradpost cluster.

from trainer_client import RemoteOptimizer, connect

session = connect()                                                  # rank and world size
optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3))
"""

from .client import ParameterClient
from .remote_optimizer import RemoteOptimizer
from .session import Session, connect

__all__ = ["ParameterClient", "RemoteOptimizer", "Session", "connect"]
