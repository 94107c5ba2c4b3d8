"""The limit of open files of this process, and the log lines when it is reached."""

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Final

from .log import LineLimit

log = logging.getLogger(__name__)

TARGETS: Final = (65536, 10240)
"""Soft limits to try in turn: macOS may refuse more than 10240 whatever its hard limit is."""
RESERVED: Final = 192
"""Files for all but HTTP: runners, other nodes, the log, and the accepts of one loop turn."""
LEAST: Final = RESERVED + 64
LOG_EVERY_S: Final = 10.0

Handler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]


def raise_limit() -> int:
    """Raises the soft limit towards the hard one and returns it; warns where it stays too low.

    macOS starts processes with 256 and most Linux systems with 1024, which idle clients exhaust.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in TARGETS:
        target = limit if hard == resource.RLIM_INFINITY else min(hard, limit)
        if soft == resource.RLIM_INFINITY or soft >= target:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):
            continue
        soft = target
        break
    if soft != resource.RLIM_INFINITY and soft < LEAST:
        log.warning(
            "this process may have %d files open, which is too few for more than %d clients; "
            "start it where `ulimit -Hn` says at least 4096",
            soft,
            connections_within(soft, soft),
        )
    return soft


def connections_within(limit: int, most: int) -> int:
    """HTTP connections, `most` at most, that leave room for other files; at least `limit` / 8."""
    if limit == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, max(limit - RESERVED, limit // 8)))


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def quiet_accepts(clock: Callable[[], float] = time.monotonic) -> Handler:
    """An exception handler for an event loop that logs failed accepts every LOG_EVERY_S at most.

    asyncio logs each of them with a traceback, which fills a disk while clients flood a port.
    """
    limit = LineLimit(1, LOG_EVERY_S, clock)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in str(context.get("message", "")):
            loop.default_exception_handler(context)
        elif limit.passes():
            fault, more = context.get("exception"), limit.left_out()
            log.error("a connection could not be accepted: %s%s", fault, more)

    return handle
