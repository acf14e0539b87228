"""Logs on stderr: short coloured lines on a terminal, else one JSON object per line.

log = get_logger()
configure_logs("pserver", format=settings.log_format, level=settings.log_level)
bind_facts(pserver=0, run="5f0c")                            # on every later line of this process
with structlog.contextvars.bound_contextvars(trainer=1):     # on the lines of this task
    log.info("joined", round=7)
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from ps_protocol.printable import escape_event, printable

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_NAME = "gradpost"

# Not a context variable, which would reach neither the tasks of the HTTP server nor other threads.
_facts: dict[str, Any] = {}


def get_logger() -> structlog.stdlib.BoundLogger:
    """Return the logger of all services: `log.info("message", key=value)`. It works before `configure_logs`, too."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(_NAME)
    return logger


def configure_logs(role: str, format: LogFormat = "auto", level: LogLevel = "info") -> None:  # noqa: A002
    """Send the services' logs of `level`, and warnings of other libraries, to stderr in one format.

    `auto` means console if stderr is a terminal, else JSON.
    """
    is_terminal = sys.stderr.isatty()
    rendering: list[structlog.typing.Processor]
    if format == "console" or (format == "auto" and is_terminal):
        time = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        console = structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=_print_traceback)
        rendering = [escape_event, console]
    else:
        time = structlog.processors.TimeStamper(fmt="iso", utc=True)
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _merge_facts,
        structlog.stdlib.add_log_level,
        time,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_NAME).setLevel(level.upper())
    logging.captureWarnings(True)
    _facts.clear()
    _facts["role"] = role


def _print_traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """Print a traceback, indented so that no line of an exception's text can pass for a line of the log.

    The plain formatter is used because the others print local variables, and those hold whole tensors.
    """
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write("\n".join(f"  {printable(line)}" for line in text.getvalue().splitlines()))


def bind_facts(**facts: Any) -> None:
    """Add facts to every later line of this process, from any task or thread; None removes a fact."""
    _facts.update(facts)
    for name in [name for name, fact in _facts.items() if fact is None]:
        del _facts[name]


def _merge_facts(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**_facts, **event}


if not structlog.is_configured():
    # Until `configure_logs`: the default formatter of tracebacks takes seconds for the local variables.
    *_others, _ = structlog.get_config()["processors"]
    structlog.configure(processors=[*_others, structlog.dev.ConsoleRenderer(exception_formatter=_print_traceback)])
