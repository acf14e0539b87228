"""The contract between trainers and servers.

Something belongs here only if changing it forces trainers and servers to be upgraded together.
Standard library only (pydantic in `messages`).
"""
