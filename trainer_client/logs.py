"""The trainer's own log: stderr, readable on a terminal, JSON elsewhere; the script's logging is left alone."""

from __future__ import annotations

import sys

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from ps_protocol.printable import escape_event


def make_log(**context: object) -> FilteringBoundLogger:
    """A logger bound to `context` (run, trainer, …) that does not touch structlog's global configuration."""
    is_terminal = sys.stderr.isatty()
    rendering: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if is_terminal:
        rendering = [escape_event, structlog.dev.ConsoleRenderer()]
    log: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        context_class=dict,
    )
    return log.bind(role="trainer", **context)
