"""Tasks that run beside everything else: one that ends by an error says so."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


def background(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    """Starts `work`; the caller keeps the task and cancels it at the end.

    Nobody awaits such a task before that, so its error would be told only when it is collected.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell)
    return task


def _tell(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.error("%s ended by an error", task.get_name(), exc_info=fault)
