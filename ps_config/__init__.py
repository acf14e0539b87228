"""Settings, tokens, TLS certificates and host names, which a process reads before it starts, and what it measures."""
