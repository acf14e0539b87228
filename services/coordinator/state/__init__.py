"""The state of the coordinator and its transitions: no network, no clock, no disk."""
