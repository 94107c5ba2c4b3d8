"""Log lines on stderr: for a person on a terminal, else one JSON object a line.

Callers never log prompts, answers or keys; nothing here filters them out afterwards.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from .own_command import typable

_request: ContextVar[str | None] = ContextVar("request", default=None)

_QUIET: Final = (
    *("asyncio", "filelock", "grpc", "httpcore", "httpcore2", "httpx", "httpx2"),
    *("huggingface_hub", "urllib3", "uvicorn", "zeroconf"),
)
FILE_BYTES: Final = 10_000_000
OLD_FILES: Final = 3
_SILENT: Final = ("uvicorn.access",)  # the API logs each request itself, with its id

# C0, DEL and C1: a peer's or client's text must not move the cursor or forge a line. Embeddings,
# overrides and isolates of Unicode: nor may it show its characters in another order.
_CONTROLS: Final[Mapping[int, str]] = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))},
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}


@contextmanager
def request_scope(request: str) -> Generator[None]:
    """Mark every line logged inside, in this task and the tasks it starts, with the request."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def apart() -> Context:
    """A context for a task that outlives the request that happens to start it."""
    context = copy_context()
    _ = context.run(_request.set, None)
    return context


def escape_controls(text: str, *, keep: str = "") -> str:
    """`text` with each control character that is not in `keep` shown as `\\x1b`."""
    return text.translate(
        {code: escape for code, escape in _CONTROLS.items() if chr(code) not in keep}
    )


class LineLimit:
    """Lets a few lines a period pass and counts the others, which strangers may cause."""

    def __init__(
        self, lines: int, period_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines, self._period_s, self._clock = lines, period_s, clock
        self._period_start = clock()
        self._passed = 0
        self._left_out = 0

    def passes(self) -> bool:
        if self._clock() - self._period_start >= self._period_s:
            self._period_start, self._passed = self._clock(), 0
        if self._passed >= self._lines:
            self._left_out += 1
            return False
        self._passed += 1
        return True

    def left_out(self) -> str:
        """The end of the next line: how many lines did not pass. Resets the count."""
        count, self._left_out = self._left_out, 0
        return f" ({count} such lines were left out before)" if count else ""


class HumanFormatter(logging.Formatter):
    """`14:03:07 warning membership: beta is suspect  request=r1` in local time."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        name = record.name.rpartition(".")[2] if record.name.startswith("exo_node") else record.name
        tail = "".join(f"  {k}={v}" for k, v in _fields().items())
        message = typable(record.getMessage())
        line = f"{clock} {record.levelname.lower():<7} {name}: {message}{tail}"
        return escape_controls(line, keep="\t") + _traceback(self, record, prefix="\n")


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, node, then request and traceback."""

    def __init__(self, node: str | None) -> None:
        """`node` is the name of this node, in every line."""
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "node": self._node,
            **_fields(),
        }
        if trace := _traceback(self, record):
            line["traceback"] = trace
        return json.dumps(line, default=str)


class _NodeHandler(logging.StreamHandler[TextIO]):
    """A class of its own, so that a second `configure` replaces no other handler."""


class _FileHandler(RotatingFileHandler):
    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(
            file,
            maxBytes=FILE_BYTES,
            backupCount=OLD_FILES,
            encoding="utf-8",
            errors="backslashreplace",
        )

        self._faults = LineLimit(1, 60.0)

    def handleError(self, record: logging.LogRecord) -> None:
        """Reports a full disk on stderr, once a minute; else a traceback for each line."""
        fault = sys.exc_info()[1]
        if not isinstance(fault, OSError):
            super().handleError(record)
        elif self._faults.passes():
            text = f"{self.baseFilename} cannot be written: {fault.strerror}"
            with suppress(OSError):
                print(f"{text}{self._faults.left_out()}", file=sys.stderr, flush=True)

    def doRollover(self) -> None:
        """Continues in the same file where it cannot be renamed: no line is lost for its length."""
        try:
            super().doRollover()
        except OSError:
            if self.stream is None:  # pyright: ignore[reportUnnecessaryComparison]
                self.stream = self._open()


def configure(
    log_format: Literal["human", "json"],
    level: str = "info",
    *,
    node: str | None = None,
    stream: TextIO | None = None,
    file: Path | None = None,
) -> None:
    """Sends every logger of this process to stderr, a stream or a file; may be called again.

    A file keeps at most FILE_BYTES, with OLD_FILES earlier ones beside it. Raises OSError for it.
    """
    handler = _FileHandler(file) if file else _NodeHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(HumanFormatter() if log_format == "human" else JsonFormatter(node))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, (_NodeHandler, _FileHandler))]:
        root.removeHandler(old)
        with suppress(OSError):  # a full disk refuses what was not written yet
            old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def terminal() -> TextIO | None:
    """The terminal that shows a person the log; None where a file or a program gets it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _NodeHandler) and isinstance(handler.formatter, HumanFormatter):
            return handler.stream if handler.stream.isatty() else None
    return None


def show(text: str) -> None:
    """Prints a block on `terminal`, a line apart; nothing for no text, or without one."""
    if text and (stream := terminal()) is not None:
        lines = "\n".join(escape_controls(line) for line in text.split("\n"))
        print(f"\n{lines}\n", file=stream, flush=True)


def _fields() -> dict[str, Any]:
    request = _request.get()
    return {} if request is None else {"request": request}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord, prefix: str = "") -> str:
    # asyncio logs with exc_info=False, which the record then holds.
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return prefix + escape_controls(formatter.formatException(record.exc_info), keep="\n\t")
