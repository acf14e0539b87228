"""The session of a process: its place in the run and on its host, and the end of its script."""
