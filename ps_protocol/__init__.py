"""The contract between trainers and servers.

Code belongs here only if changing it forces trainers and servers to be upgraded together. The package needs the
standard library alone, except pydantic for messages and torch for encodings.
"""
