"""The synchronous mode: rounds, their executor and its tensor work."""
