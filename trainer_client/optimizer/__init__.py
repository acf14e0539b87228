"""`RemoteOptimizer`, and what attaches to a script's optimizer, model and data loader."""
