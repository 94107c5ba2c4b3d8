"""Files of models that peers stop reading: nothing of them stays open, and no thread uses it."""

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

from exo_node.node.rpc.model_files import ModelFilesService
from exo_node.proto import peer_pb2 as pb

ANY: Any = None


class SlowFile:
    """A file that is opened and read while `goes_on` is set."""

    def __init__(self, *, opens_at_once: bool) -> None:
        self.goes_on, self.began = threading.Event(), threading.Event()
        self.opens_at_once = opens_at_once
        self.log = list[str]()

    def open(self, _: pb.FileRequest) -> "SlowFile":
        if not self.opens_at_once:
            self._wait()
        self.log.append("opened")
        return self

    def read(self) -> bytes:
        self._wait()
        self.log.append("read")
        return b"data"

    def close(self) -> None:
        self.log.append("closed")

    def _wait(self) -> None:
        self.began.set()
        assert self.goes_on.wait(30)


@pytest.mark.parametrize(
    ("opens_at_once", "log"),
    [(False, ["opened", "closed"]), (True, ["opened", "read", "closed"])],
    ids=["while it is opened", "while it is read"],
)
def test_a_file_is_closed_once_and_after_its_last_use(opens_at_once: bool, log: list[str]) -> None:
    file = SlowFile(opens_at_once=opens_at_once)

    async def run() -> None:
        source: Any = file
        service = ModelFilesService(source, lambda: False)
        reading = asyncio.ensure_future(anext(service.Read(pb.FileRequest(), ANY)))
        _ = await asyncio.to_thread(file.began.wait, 30)
        _ = reading.cancel()
        _ = await asyncio.wait([reading], timeout=0.05)
        file.goes_on.set()
        with suppress(asyncio.CancelledError):
            _ = await reading
        assert reading.cancelled()

    asyncio.run(run())
    assert file.log == log
