"""The socket to the node that started this runner."""

import logging
import socket
import threading

from ...proto import peer_pb2 as pb
from ...proto.framing import HEAD_BYTES, body_bytes, framed

log = logging.getLogger(__name__)


class Parent:
    """The socket to the node. Messages are protobuf behind a four-byte big-endian length."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    def receive(self) -> pb.ToRunner | None:
        """The next message; None when the node is gone."""
        head = self._exactly(HEAD_BYTES)
        if head is None:
            return None
        body = self._exactly(body_bytes(head))
        return None if body is None else pb.ToRunner.FromString(body)

    def send(self, message: pb.FromRunner) -> None:
        """Any thread. A node that is gone is noticed by the reader."""
        data = framed(message.SerializeToString())
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                log.debug("the node is gone")

    def _exactly(self, count: int) -> bytes | None:
        try:
            data = self._reader.read(count)
        except OSError:
            return None
        return data if len(data) == count else None
