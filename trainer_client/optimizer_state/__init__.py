"""Optimizer state in the forms of `torch.optim`, the trainer and the pservers."""
