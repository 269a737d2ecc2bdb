"""What is written for people: log lines, with the manifest's levels, and every text with its control characters made
visible, because models, rewards, environments and other people's files may put them there to command the terminal.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

LogLevel = Literal["Debug", "Info", "Warning", "Error"]
LogFormat = Literal["Auto", "Text", "JSON"]

_LEVELS: dict[LogLevel, int] = {
    "Debug": logging.DEBUG,
    "Info": logging.INFO,
    "Warning": logging.WARNING,
    "Error": logging.ERROR,
}


_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """The text with visible symbols in place of control characters."""
    return text.translate(_PICTURES)


class _Printable:
    """A stream that makes the control characters visible in what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printable_output() -> Iterator[None]:
    """Makes control characters visible on standard output and standard error; `plain_stream` leads around it."""
    out, err = (cast(TextIO, _Printable(plain_stream(stream))) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def plain_stream(stream: TextIO) -> TextIO:
    """The stream itself, to which colours and data for programs are written unchanged."""
    return stream.stream if isinstance(stream, _Printable) else stream


def build_console(file: IO[str] | None = None, **settings: Any) -> Console:
    """A console of rich on a stream (standard output), whose own codes reach the terminal and those in texts do not."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return PrintableConsole(file=plain_stream(cast(TextIO, file or sys.stdout)), **settings)


def _printable_event(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def is_json(log_format: LogFormat, *, is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Resolves `Auto`: JSON lines in a pod, whose log machines read; text in a batch job's log, which people read."""
    if log_format == "Auto":
        return not is_terminal and "KUBERNETES_SERVICE_HOST" in environ
    return log_format == "JSON"


class _CurrentStderr:
    """Standard error, looked up at each write: a live display replaces it while it is shown."""

    def write(self, text: str) -> int:
        return plain_stream(sys.stderr).write(text)

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
        _printable_event,
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
