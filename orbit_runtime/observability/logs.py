"""Log lines: sets up structlog once per process, with the manifest's levels."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import IO, Any, Literal, TextIO, cast

LogLevel = Literal["Debug", "Info", "Warning", "Error"]
LogFormat = Literal["Auto", "Text", "JSON"]

_LEVELS: dict[LogLevel, int] = {
    "Debug": logging.DEBUG,
    "Info": logging.INFO,
    "Warning": logging.WARNING,
    "Error": logging.ERROR,
}


def is_json(log_format: LogFormat, *, is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Resolves `Auto`: JSON lines in a pod, whose log machines read; text in a batch job's log, which people read."""
    if log_format == "Auto":
        return not is_terminal and "KUBERNETES_SERVICE_HOST" in environ
    return log_format == "JSON"


class _CurrentStderr:
    """Standard error, looked up at each write: a live display replaces it while it is shown."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def configure_logs(level: LogLevel = "Info", log_format: LogFormat = "Auto", *, stream: IO[str] | None = None) -> None:
    """Sends structlog and stdlib logging to `stream` (stderr): lines of text, coloured on a terminal, or JSON lines.

    Safe to call twice; the later call wins.
    """
    import structlog

    target = cast(TextIO, _CurrentStderr() if stream is None else stream)
    as_json = is_json(log_format, is_terminal=target.isatty(), environ=os.environ)
    renderer: Any = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=target.isatty())
    )
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    # At Info, vendors' loggers write what only their developers want to read.
    for noisy in ("httpx", "httpcore", "uvicorn", "asyncio", "filelock"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, _LEVELS[level]))


def get_logger(name: str) -> Any:
    """A structlog logger: `log.info("published", version=3)`."""
    import structlog

    return structlog.get_logger(logger=name)
