"""The slices of one pserver: their values, their optimizers, and staged contributions and replies as memory."""
