"""The durable state of a pserver: the log of updates, checkpoints, and the folder that contains them."""
