"""OptimizerState of the optimizer between `torch.optim`'s form, a trainer and the pservers."""
