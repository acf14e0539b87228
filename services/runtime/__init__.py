"""The common part of all services: settings, HTTP application and server, metrics, logs, storage."""
