"""The trainer's own log: stderr, readable on a terminal, JSON elsewhere; the script's logging is left alone."""

from __future__ import annotations

import sys

import structlog
from structlog.typing import FilteringBoundLogger


def make_log(**context: object) -> FilteringBoundLogger:
    """A logger bound to `context` (run, trainer, …) that does not touch structlog's global configuration."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    log: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        context_class=dict,
    )
    return log.bind(role="trainer", **context)
