"""The limit in time of what is read of the hub, over the connections that it takes."""

import socket
from contextlib import ExitStack

import pytest

from exo_node.node.store.stop_signal import Stopped, StopSignal
from exo_node.placement.errors import DownloadFailed


class _Stream:
    """A connection whose other end says nothing, as an HTTP client reports it."""

    def __init__(self, stack: ExitStack, stop: StopSignal) -> None:
        self._here, _ = (stack.enter_context(each) for each in socket.socketpair())
        stop.trace("connection.connect_tcp.complete", {"return_value": self})

    def get_extra_info(self, _: str) -> socket.socket:
        return self._here

    def is_shut(self, within_s: float = 10.0) -> bool:
        self._here.settimeout(within_s)
        try:
            return self._here.recv(1) == b""
        except OSError:
            return False


def test_connections_that_are_opened_after_the_limit_are_shut_as_well() -> None:
    """A list of pages may be between two of them when its time is up."""
    with ExitStack() as stack:
        stop, shut = StopSignal(), list[bool]()
        with pytest.raises(DownloadFailed, match="within 0 s"), stop.limit(0.0, "a list"):
            shut += [_Stream(stack, stop).is_shut(), _Stream(stack, stop).is_shut()]
            raise OSError
        assert shut == [True, True]
        assert not _Stream(stack, stop).is_shut(0.0), "the limit was that of the block"


def test_a_limit_holds_in_its_block_alone_and_in_those_within() -> None:
    with ExitStack() as stack:
        stop, shut = StopSignal(), list[bool]()
        with pytest.raises(DownloadFailed, match="outer"), stop.limit(0.0, "outer"):
            shut.append(_Stream(stack, stop).is_shut())
            with stop.limit(60.0, "inner"):
                shut.append(_Stream(stack, stop).is_shut())
            raise OSError
        with stop.limit(60.0, "outer"):
            with pytest.raises(DownloadFailed, match="inner"), stop.limit(0.0, "inner"):
                shut.append(_Stream(stack, stop).is_shut())
                raise OSError
            shut.append(_Stream(stack, stop).is_shut(0.0))
        assert shut == [True, True, True, False]


def test_a_stop_is_told_apart_from_a_limit() -> None:
    with ExitStack() as stack:
        stop = StopSignal()
        with pytest.raises(Stopped), stop.limit(60.0, "a list"):
            stop.set()
            raise OSError
        assert _Stream(stack, stop).is_shut()
