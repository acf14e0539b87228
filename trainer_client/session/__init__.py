"""The session of a process: its I/O thread, its place on its host, and the end of its script."""
