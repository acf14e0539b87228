"""Processes of tests that start at once: Linux forks them from one that has imported torch and our packages already.

Such a process runs a command as Python does, with the environment, folder and descriptors it is given, in a session of
its own, and is a child of the one that ordered it. No module of ours reads the environment when it is imported.
"""
