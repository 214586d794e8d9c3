"""Logging: decides how events look: key=value on a terminal, JSON elsewhere; always on standard error."""

import logging
import os
import sys
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from kvpool.ops.settings import LogSettings

__all__ = ["configure", "get_logger"]


def configure(settings: LogSettings) -> None:
    """Set up logging for this process; only a process's ``main`` calls it."""
    on_terminal = sys.stderr.isatty()
    as_json = settings.format == "json" or (settings.format == "auto" and not on_terminal)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(_json() if as_json else _console(colors=on_terminal and not os.environ.get("NO_COLOR"))),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose events carry ``component=name``: ``log.info("node_joined", node_id=...)``."""
    return cast("FilteringBoundLogger", structlog.get_logger(component=name))


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=repr)]


def _console(*, colors: bool) -> list[Processor]:
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
