"""The processes of a cluster: one package for each role, and the runtime that they share."""
