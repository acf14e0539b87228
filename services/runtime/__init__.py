"""What every service process needs, whatever its role: settings, HTTP application and server, metrics, logs."""
