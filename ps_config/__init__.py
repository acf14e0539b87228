"""What a process reads before it starts: settings, tokens, TLS certificates, host names and software versions."""
