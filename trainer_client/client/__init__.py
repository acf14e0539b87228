"""Clients of a run: joining and leaving at the coordinator, pushes and pulls at the pservers."""
