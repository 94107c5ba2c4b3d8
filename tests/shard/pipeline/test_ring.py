"""The generator's end of a pipeline, without processes: answers, failures, losses, deadlines."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from exo_node.placement.errors import ExoNodeError, InvalidFrame, PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.pipeline import streams as links
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.streams import Ring

HIDDEN = 4


class Stream:
    """Takes what the ring sends."""

    def __init__(self) -> None:
        self.sent: list[pb.Frame] = []

    def send(self, frames: Iterable[pb.Frame]) -> None:
        self.sent += frames

    @property
    def kinds(self) -> list[str | None]:
        return [frame.WhichOneof("kind") for frame in self.sent]


def block(
    request: str = "r1", attempt: int = 1, reply: "pb.Reply.ValueType" = pb.REPLY_ALL
) -> HiddenBlock:
    return HiddenBlock(request, attempt, 0, 1, (1,), reply, bytes(HIDDEN * 4))


def failure(request: str = "r1", attempt: int = 1) -> pb.Frame:
    failed = pb.Failure(code="invalid_frame", message="no", param="hidden.shape", stage=1)
    return pb.Frame(placement="p1", request=request, attempt=attempt, failure=failed)


def asked(ring: Ring, wanted: HiddenBlock) -> "Future[HiddenBlock]":
    future = ring.send(wanted)
    assert future is not None
    return future


async def settled() -> None:
    """What the ring left to the loop has been done."""
    done = asyncio.Event()
    _ = asyncio.get_running_loop().call_soon(done.set)
    _ = await done.wait()


async def fault_of(future: "Future[Any]") -> BaseException | None:
    wrapped = asyncio.wrap_future(future)
    _ = await asyncio.wait([wrapped], timeout=60)
    assert wrapped.done()
    return wrapped.exception()


Play = Callable[[Ring, Any], Awaitable[None]]


def on_a_ring(play: Play, *, connected: bool = True) -> None:
    async def run() -> None:
        ring, stream = Ring("p1", 2, "float32", HIDDEN), Stream()
        if connected:
            ring.connect(stream)  # pyright: ignore[reportArgumentType]
        await play(ring, stream)

    asyncio.run(run())


def test_an_answer_goes_to_the_request_and_attempt_that_wait_for_it() -> None:
    async def play(ring: Ring, stream: Stream) -> None:
        first, second = asked(ring, block("r1", 2)), asked(ring, block("r2"))
        await settled()
        assert stream.kinds == ["hidden", "hidden"]
        assert [frame.hidden.stage for frame in stream.sent] == [1, 1]
        ring.answer(block("r1", 1))
        ring.answer(block("unknown"))
        assert not first.done() and not second.done()
        ring.answer(block("r2"))
        ring.answer(block("r1", 2))
        assert (first.result(0).attempt, second.result(0).request) == (2, "r2")

    on_a_ring(play)


def test_an_answer_of_a_request_that_was_released_is_dropped() -> None:
    async def play(ring: Ring, stream: Stream) -> None:
        future = asked(ring, block())
        ring.release("r1", 1)
        ring.answer(block())
        await settled()
        assert future.cancelled()  # those that it went with do not wait for it
        assert stream.kinds == ["hidden", "release"]

    on_a_ring(play)


def test_a_chunk_that_wants_no_answer_waits_for_none() -> None:
    async def play(ring: Ring, stream: Stream) -> None:
        assert ring.send(block(reply=pb.REPLY_NONE)) is None
        await settled()
        assert stream.kinds == ["hidden"]

    on_a_ring(play)


def test_a_failure_reaches_the_future_or_the_next_send() -> None:
    async def play(ring: Ring, _stream: Stream) -> None:
        waiting = asked(ring, block("r1"))
        assert ring.send(block("r2", reply=pb.REPLY_NONE)) is None
        for name in ("r1", "r2", "nobody"):
            ring.fail(failure(name))
        fault = await fault_of(waiting)
        assert isinstance(fault, InvalidFrame) and fault.param == "hidden.shape"
        with pytest.raises(InvalidFrame):
            _ = ring.send(block("r2"))

    on_a_ring(play)


def test_a_failure_of_an_earlier_attempt_does_not_end_the_later_one() -> None:
    async def play(ring: Ring, _stream: Stream) -> None:
        future = asked(ring, block("r1", 2))
        ring.fail(failure("r1", 1))
        ring.answer(block("r1", 2))
        assert future.result(0).attempt == 2

    on_a_ring(play)


def test_a_loss_fails_every_request_under_way_and_later_ones_until_connected_anew() -> None:
    async def play(ring: Ring, _stream: Stream) -> None:
        waiting = asked(ring, block("waiting"))
        assert ring.send(block("between", reply=pb.REPLY_NONE)) is None
        await settled()
        ring.lose(PeerLost("gone"))
        assert isinstance(await fault_of(waiting), PeerLost)
        with pytest.raises(PeerLost, match="gone"):
            _ = ring.send(block("later"))
        fresh: Any = Stream()
        ring.connect(fresh)
        # Its first rows went to the stage that is gone: the new one could only refuse the rest.
        with pytest.raises(PeerLost, match="gone"):
            _ = ring.send(block("between"))
        future = asked(ring, block("new"))
        await settled()
        assert fresh.kinds == ["hidden"]
        ring.answer(block("new"))
        assert future.result(0).request == "new"

    on_a_ring(play)


def test_a_loss_in_the_middle_of_a_send_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(ring: Ring, stream: Stream) -> None:
        def cut_while_the_peer_is_lost(*_: object) -> list[pb.Frame]:
            ring.lose(PeerLost("gone"))
            return [pb.Frame()]

        monkeypatch.setattr(links, "cut", cut_while_the_peer_is_lost)
        assert isinstance(await fault_of(asked(ring, block())), PeerLost)
        assert stream.sent == []

    on_a_ring(play)


def test_connecting_anew_fails_what_was_under_way() -> None:
    async def play(ring: Ring, _stream: Stream) -> None:
        future = asked(ring, block())
        await settled()
        ring.connect(Stream())  # type: ignore[arg-type]
        assert isinstance(await fault_of(future), PeerLost)

    on_a_ring(play)


def test_before_the_stages_are_connected_a_request_fails() -> None:
    async def play(ring: Ring, _stream: Stream) -> None:
        fault = await fault_of(asked(ring, block()))
        assert isinstance(fault, PeerLost) and "not connected" in fault.message

    on_a_ring(play, connected=False)


def chunk(request: str = "r1", position: int = 0, attempt: int = 1) -> HiddenBlock:
    return replace(block(request, attempt, pb.REPLY_COMPUTED), position=position)


def computed(request: str = "r1", position: int = 0, attempt: int = 1) -> pb.Frame:
    told = pb.Computed(position=position)
    return pb.Frame(placement="p1", request=request, attempt=attempt, computed=told)


def test_a_chunk_is_done_when_all_stages_have_computed_it() -> None:
    async def play(ring: Ring, stream: Stream) -> None:
        first, second = ring.send_chunk(chunk()), ring.send_chunk(chunk(position=1))
        other = ring.send_chunk(chunk("r2"))
        await settled()
        assert [f.hidden.reply for f in stream.sent] == [pb.REPLY_COMPUTED] * 3
        for told in (computed(attempt=2), computed("nobody"), computed(position=7)):
            ring.computed(told)
        assert not any(future.done() for future in (first, second, other))
        ring.computed(computed(position=1))
        assert (first.done(), second.done(), other.done()) == (False, True, False)
        ring.computed(computed(position=1))  # once more: nobody waits for it
        ring.computed(computed())
        assert first.done() and not other.done()

    on_a_ring(play)


def test_what_fails_of_a_chunk_is_raised_by_the_next_call_and_nobody_waits_for_it() -> None:
    async def play(ring: Ring, _stream: Stream) -> None:
        failed, other = ring.send_chunk(chunk()), ring.send_chunk(chunk("r2"))
        ring.fail(failure())
        assert failed.done() and not other.done()
        ring.check("r2", 1)
        with pytest.raises(InvalidFrame):
            ring.check("r1", 1)
        ring.lose(PeerLost("gone"))
        assert other.done()
        with pytest.raises(PeerLost, match="gone"):
            _ = ring.send_chunk(chunk("r2", 1))

    on_a_ring(play)


def test_nobody_waits_for_the_chunks_of_a_request_that_is_over() -> None:
    async def play(ring: Ring, _stream: Stream) -> None:
        released, other = ring.send_chunk(chunk()), ring.send_chunk(chunk(attempt=2))
        ring.release("r1", 1)
        assert released.done() and not other.done()

    on_a_ring(play)


def test_a_chunk_that_nobody_hears_of_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PREFILL_DEADLINE_S", 0.05)

    async def play(ring: Ring, _stream: Stream) -> None:
        in_time, late = ring.send_chunk(chunk("r2")), ring.send_chunk(chunk())
        ring.computed(computed("r2"))
        assert await fault_of(late) is None
        assert in_time.done()
        ring.check("r2", 1)
        with pytest.raises(PeerLost, match="did not answer"):
            ring.check("r1", 1)

    on_a_ring(play)


@pytest.mark.parametrize("reply", [pb.REPLY_ALL, pb.REPLY_LAST])
def test_an_answer_that_does_not_come_is_a_lost_peer(
    reply: "pb.Reply.ValueType", monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "DECODE_DEADLINE_S" if reply == pb.REPLY_ALL else "PREFILL_DEADLINE_S"
    monkeypatch.setattr(links, name, 0.05)

    async def play(ring: Ring, _stream: Stream) -> None:
        late, answered = (
            asked(ring, block("r1", reply=reply)),
            asked(ring, block("r2", reply=reply)),
        )
        ring.answer(block("r2", reply=reply))
        fault = await fault_of(late)
        assert isinstance(fault, PeerLost) and "did not answer" in fault.message
        assert answered.exception(0) is None

    on_a_ring(play)


def test_an_answer_behind_what_is_rebuilt_has_a_prompts_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row of another request, sent later, is late by the deadline of decoding."""
    monkeypatch.setattr(links, "DECODE_DEADLINE_S", 0.05)

    async def play(ring: Ring, _stream: Stream) -> None:
        assert ring.send(block("resumed", reply=pb.REPLY_NONE)) is None
        resumed, other = asked(ring, block("resumed")), asked(ring, block("other"))
        assert isinstance(await fault_of(other), PeerLost)
        assert not resumed.done()
        ring.answer(block("resumed"))
        assert isinstance(await fault_of(asked(ring, block("resumed"))), PeerLost)

    on_a_ring(play)


def test_the_first_answer_behind_rows_that_are_read_again_may_take_as_long_as_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A minute for each 512 of them, or a long prompt would be given up as lost once more."""
    given: list[float] = []
    dispatch = Ring._dispatch  # pyright: ignore[reportPrivateUsage]

    def noted(ring: Ring, keys: Any, frames: list[pb.Frame], deadline_s: float) -> None:
        given.append(deadline_s)
        dispatch(ring, keys, frames, deadline_s)

    monkeypatch.setattr(Ring, "_dispatch", noted)

    async def play(ring: Ring, _stream: Stream) -> None:
        row, rows = block(attempt=2, reply=pb.REPLY_NONE), links.MOST_ROWS
        again = replace(row, rows=rows, data=row.data * rows, tokens=row.tokens * rows)
        for _ in range(3):
            assert ring.send(again) is None
        for _ in range(2):
            _ = ring.send(block(attempt=2))
            await settled()
            ring.answer(block(attempt=2))
        reading = 4 * links.PREFILL_DEADLINE_S
        assert given[-2:] == [reading, links.DECODE_DEADLINE_S]

    on_a_ring(play)


def test_what_all_stages_keep_comes_round_and_is_lost_with_them() -> None:
    async def play(ring: Ring, stream: Stream) -> None:
        asked_ = ring.held_by_all("r1", 1, [5, 6, 7], [2, 1], [2, 3])
        await settled()
        (frame,) = stream.sent
        assert (list(frame.prefix.tokens), list(frame.prefix.held)) == ([5, 6, 7], [2, 3])
        frame.prefix.held[:] = [2]
        ring.prefix(frame)
        assert asked_.result() == [2]
        late = ring.held_by_all("r2", 1, [5, 6, 7], [3], [3])
        ring.lose(PeerLost("gone"))
        assert isinstance(await fault_of(late), PeerLost)
        ring.prefix(pb.Frame(request="r2", attempt=1, prefix=frame.prefix))  # nobody waits

    on_a_ring(play)


class Cache:
    """Stands for what a request holds in memory."""


def test_an_error_does_not_keep_a_requests_memory_alive() -> None:
    def one_request(ring: Ring) -> "weakref.ref[Cache]":
        cache = Cache()
        with pytest.raises(ExoNodeError):
            _ = ring.send(block())
        return weakref.ref(cache)

    async def play(ring: Ring, _stream: Stream) -> None:
        ring.lose(PeerLost("gone"))
        left = one_request(ring)
        _ = gc.collect()
        assert left() is None

    on_a_ring(play)
