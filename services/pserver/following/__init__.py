"""A standby: a process that follows a pserver, repeats its updates, and serves reads."""
