"""How many files this process may have open, and what is told when it has too many."""

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger(__name__)

WANTED: Final = (65536, 10240)
"""Soft limits to try in turn: macOS may refuse more than 10240 whatever its hard limit says."""
RESERVED: Final = 192
"""Files for all but HTTP: runners, other nodes, the log, and one turn's accepted connections."""
LEAST: Final = RESERVED + 64
TELL_EVERY_S: Final = 10.0

Handler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]


def raise_limit() -> int:
    """Raises the soft limit towards the hard one and returns it; says so where it stays too low.

    macOS starts processes with 256 and most Linux systems with 1024, which idle clients exhaust.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in WANTED:
        target = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
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


def connections_within(limit: int, wanted: int) -> int:
    """How many HTTP connections leave room for everything else, at least an eighth of `limit`."""
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, max(limit - RESERVED, limit // 8)))


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def quiet_accepts(clock: Callable[[], float] = time.monotonic) -> Handler:
    """An exception handler for an event loop that tells of failed accepts now and then only.

    asyncio tells each of them with a traceback, which fills a disk while clients flood a port.
    """
    told_at: float | None = None
    untold = 0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at, untold
        if "accept" not in str(context.get("message", "")):
            loop.default_exception_handler(context)
            return
        now = clock()
        if told_at is not None and now - told_at < TELL_EVERY_S:
            untold += 1
            return
        more = f" ({untold} times more since the last line)" if untold else ""
        log.error("a connection could not be accepted: %s%s", context.get("exception"), more)
        told_at, untold = now, 0

    return handle
