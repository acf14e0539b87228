"""Engines whose processes reduce gradients among themselves: the trainers of a ring, and the processes of a host."""
