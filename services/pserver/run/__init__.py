"""One run on one pserver: its schedules, which decide, and the executors, which apply."""
