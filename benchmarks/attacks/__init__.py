"""Attacks on a running pserver, and their effect on an honest client. `measure.py` makes the table."""
