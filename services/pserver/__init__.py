"""The pserver: holds a shard of the model, stages contributions, runs the optimizer, answers gets."""
