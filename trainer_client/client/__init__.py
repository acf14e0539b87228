"""Clients of a run: the membership at the coordinator, and pushes and pulls at the pservers."""
