"""Settings, tokens, TLS certificates, host names and versions: a process reads them before it starts."""
