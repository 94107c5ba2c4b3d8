"""The frames of one stream: appended by the task that answers, followed by its readers."""

import asyncio
from collections.abc import AsyncGenerator

_END = b"\n\n"


class FrameLog:
    """Frames by number, from 0. They stay until the last reader has left."""

    def __init__(self, frames: bytes = b"") -> None:
        self._frames = list[bytes]()
        self._is_complete = False
        self._change = asyncio.Event()
        self.append(frames)

    @property
    def last(self) -> int:
        """The number of the last frame; -1 before the first one."""
        return len(self._frames) - 1

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def __bytes__(self) -> bytes:
        return b"".join(self._frames)

    def append(self, frames: bytes) -> None:
        """Adds frames: JSON has no raw line break, so an empty line ends each."""
        self._frames += [frame + _END for frame in frames.split(_END)[:-1]]
        self._wake()

    def complete(self) -> None:
        """Ends the stream for all readers."""
        self._is_complete = True
        self._wake()

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """The frames after a number, also those to come, until the stream is complete."""
        number = after + 1
        while True:
            while number < len(self._frames):
                yield self._frames[number]
                number += 1
            if self._is_complete:
                return
            _ = await self._change.wait()

    def _wake(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()
