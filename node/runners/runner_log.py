"""The log lines of runners in this node's log."""

import asyncio
import logging
import re
from asyncio.subprocess import Process
from collections import deque

from ..machine.log import LineLimit

log = logging.getLogger("exo_node.runner")

STRAY_LINES, STRAY_PERIOD_S = 10, 60.0
"""The limit on lines that are not the runner's own logging, such as gRPC's on failed handshakes."""
LAST_WORDS_S = 1.0
"""The longest wait for what an ended process wrote, which a busy node reads late. Its own children
may have its stderr open for longer. A killed process wrote no reason and is not waited for."""
_GRPC_LINE = re.compile(r"[DIWEF]\d{4} [\d:.]+ ")
_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL):([\w.]+):(.*)")


async def relay(process: Process, last: deque[str]) -> None:
    """Copies the process's stderr to the log; lines that are no logging, as of a crash, to `last`
    as well."""
    assert process.stderr is not None
    limit = LineLimit(STRAY_LINES, STRAY_PERIOD_S)
    while line := await _line(process.stderr):
        text = line.decode(errors="replace").rstrip()
        if match := _LINE.fullmatch(text):
            level = logging.getLevelNamesMapping()[match[1]]
            log.log(level, "%s[%d] %s", match[2], process.pid, match[3])
        elif text:
            if not _GRPC_LINE.match(text):  # these never have the reason of an end
                last.append(text)
            if limit.passes():
                log.info("[%d] %s%s", process.pid, text, limit.left_out())


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Reads one line; an overlong one is replaced by a remark."""
    try:
        return await reader.readline()
    except ValueError:  # longer than the buffer, which was dropped
        return b"(an overlong line was dropped)\n"
