"""Files read beside the event loop, so that a disk that hangs does not block the node."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ...shard.checkpoint.files import read_regular

__all__ = ["BackgroundRead", "read_regular"]

_LOG: Final = logging.getLogger(__name__)
_LIMIT_S: Final = 1.0
Value = TypeVar("Value")


class BackgroundRead(Generic[Value]):
    """The latest value of a blocking `read`, which each `refresh` calls; an older one if it hangs.

    `read` gets the previous value, None at first. The constructor calls it in the caller's thread.
    """

    def __init__(self, name: object, read: Callable[[Value | None], Value]) -> None:
        """`name` stands in log lines."""
        self._name = name
        self._read = read
        self._run: asyncio.Future[None] | None = None
        self._is_late = False
        self.value = read(None)

    async def refresh(self) -> None:
        """Waits for a read, at most a second in all for one that hangs."""
        if self._run is None or self._run.done():
            self._run, self._is_late = asyncio.get_running_loop().create_future(), False
            # A daemon thread: one that hangs would occupy a pool and keep the process from ending.
            threading.Thread(target=self._work, args=(self._run,), daemon=True).start()
        if self._is_late:
            return
        run = self._run  # another refresh may begin the next one before this one resumes
        _ = await asyncio.wait([run], timeout=_LIMIT_S)
        if not run.done() and not self._is_late:
            self._is_late = True
            _LOG.warning("%s cannot be read at the moment; what it held before counts", self._name)

    def _work(self, run: "asyncio.Future[None]") -> None:
        value = self.value
        try:
            value = self._read(value)
        except Exception:  # the edge of this thread: the previous value stays
            _LOG.exception("%s could not be read", self._name)

        def publish() -> None:
            self.value = value
            if not run.done():
                run.set_result(None)

        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            _ = run.get_loop().call_soon_threadsafe(publish)
