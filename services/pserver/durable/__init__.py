"""What outlives a pserver's process: the log of updates, checkpoints, and the folder that holds them."""
