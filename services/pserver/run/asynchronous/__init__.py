"""The asynchronous modes: clocks, their executor, its queues and pulls."""
