"""`RemoteOptimizer`, and what attaches to a script's optimizer, model, gradient scaler and data loader."""
