"""Attacks on a running pserver, and what a good client notices of them. `measure.py` makes the table."""
