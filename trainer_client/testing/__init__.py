"""Real clusters for tests, examples and users: every service a process, every link a socket."""

from .local_cluster import LocalCluster
from .processes import Child

__all__ = ["Child", "LocalCluster"]
