"""The generator's end of a pipeline, without processes: answers, failures, losses, deadlines."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_node.placement.errors import (
    ExoNodeError,
    InvalidFrame,
    NumericError,
    PeerLost,
    StateLost,
)
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.pipeline import ring as ring_module
from exo_node.shard.pipeline.copy_query import ExactCopies
from exo_node.shard.pipeline.frames import BlockMember, HiddenBlock
from exo_node.shard.pipeline.link import Key, Trip
from exo_node.shard.pipeline.ring import Ring

HIDDEN = 4
A, B, C = ("a", 1), ("b", 1), ("c", 1)


class Stream:
    """Takes what the ring sends."""

    def __init__(self) -> None:
        self.sent: list[pb.Frame] = []

    def send(self, frames: Iterable[pb.Frame]) -> None:
        self.sent += frames

    @property
    def kinds(self) -> list[str | None]:
        return [frame.WhichOneof("kind") for frame in self.sent]


def block(*keys: Key, reply: "pb.Reply.ValueType" = pb.REPLY_ALL, position: int = 5) -> HiddenBlock:
    """A row of each."""
    members = tuple(BlockMember(*key, position + index) for index, key in enumerate(keys))
    return HiddenBlock(members, 1, (1,) * len(keys), reply, bytes(HIDDEN * 4 * len(keys)))


def chunk(key: Key, position: int = 0) -> HiddenBlock:
    return block(key, reply=pb.REPLY_COMPUTED, position=position)


def computed(key: Key, position: int = 0) -> pb.Frame:
    message = pb.Computed(position=position)
    return pb.Frame(placement="p1", request=key[0], attempt=key[1], computed=message)


def failure(key: Key, fault: ExoNodeError | None = None) -> pb.Frame:
    fault = InvalidFrame("no", param="hidden.shape") if fault is None else fault
    message = pb.Failure(code=fault.code, message=fault.message, param=fault.param or "", stage=1)
    return pb.Frame(placement="p1", request=key[0], attempt=key[1], failure=message)


def prefix_frame(key: Key, rows: Sequence[int]) -> pb.Frame:
    query = pb.PrefixQuery(held=rows)
    return pb.Frame(placement="p1", request=key[0], attempt=key[1], prefix=query)


async def settled() -> None:
    """Waits until the ring's calls on the loop have run."""
    is_done = asyncio.Event()
    _ = asyncio.get_running_loop().call_soon(is_done.set)
    _ = await is_done.wait()


async def send_block(ring: Ring, block_out: HiddenBlock) -> Trip:
    """Sends a block and returns its trip."""
    trip = ring.send(block_out)
    await settled()
    return trip


async def back(*trips: Trip) -> None:
    async with asyncio.timeout(30):
        while not all(trip.is_back for trip in trips):
            await asyncio.sleep(0.005)


def errors_of(trip: Trip) -> dict[Key, str]:
    """Messages of errors, by member."""
    assert trip.is_back
    return {key: fault.code for key, fault in trip.faults.items()}


LOST, REFUSED, STATE = (
    PeerLost("").code,
    InvalidFrame("", param="x").code,
    StateLost("").code,
)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
async def ring(stream: Stream) -> Ring:
    ring = Ring("p1", "float32", HIDDEN)
    ring.connect(stream)  # pyright: ignore[reportArgumentType]
    return ring


async def test_an_answer_goes_to_the_request_attempt_and_row_that_it_is_of(
    ring: Ring, stream: Stream
) -> None:
    first, second = (
        await send_block(ring, block(("r1", 2))),
        await send_block(ring, block(("r2", 1))),
    )
    assert stream.kinds == ["hidden", "hidden"]
    assert [frame.hidden.stage for frame in stream.sent] == [1, 1]
    for other in (block(("r1", 1)), block(("unknown", 1)), block(("r1", 2), position=6)):
        ring.answer(other)
    assert not first.is_back and not second.is_back
    ring.answer(block(("r2", 1)))
    assert not first.is_back and second.is_back
    ring.answer(block(("r1", 2)))
    assert first.is_back
    assert (first.block, second.block) == (block(("r1", 2)), block(("r2", 1)))
    assert not first.faults and not second.faults


async def test_who_listens_hears_of_each_trip_once_it_is_back(ring: Ring) -> None:
    """It comes with all that it brings, whichever way it ended."""
    trips, calls = dict[str, Trip](), list[list[str]]()
    ring.listen(lambda: calls.append([name for name, trip in trips.items() if trip.is_back]))
    trips["answered"] = await send_block(ring, block(A))
    trips["computed"] = await send_block(ring, chunk(B))
    trips["failed"] = await send_block(ring, block(C))
    trips["released"] = await send_block(ring, block(("d", 1)))
    assert calls == []
    ring.answer(block(A))
    ring.computed(computed(B))
    ring.fail(failure(C))
    ring.release(("d", 1))
    await settled()
    ring.lose(PeerLost("gone"))
    trips["lost"] = ring.send(block(A))
    await settled()
    names = list(trips)
    assert calls == [names[:count] for count in range(1, 6)]


async def test_what_is_sent_from_another_thread_is_done_on_the_loop(
    ring: Ring, stream: Stream
) -> None:
    """The compute thread only makes the trip: it never sees the ring half changed."""
    threads = set[int]()
    ring.listen(lambda: threads.add(threading.get_ident()))
    trip = await asyncio.to_thread(ring.send, block(A))
    query = await asyncio.to_thread(ring.ask_prefixes, B, [1, 2], [2], [2])
    await settled()
    ring.answer(block(A))
    await asyncio.to_thread(ring.release, B)
    await settled()
    assert trip.is_back and query.is_back
    assert stream.kinds == ["hidden", "prefix", "release"]
    assert threads == {threading.get_ident()}


# ------------------------------------------------------------------------------- failures


async def test_a_failure_reaches_the_trip_or_the_requests_next_one(
    ring: Ring, stream: Stream
) -> None:
    waiting, between = await send_block(ring, block(A)), await send_block(ring, block(B))
    ring.answer(block(B))
    for key in (A, B, ("nobody", 1)):
        ring.fail(failure(key))
    assert errors_of(waiting) == {A: REFUSED} and waiting.faults[A].param == "hidden.shape"
    assert waiting.block is None
    assert errors_of(between) == {}
    before = len(stream.sent)
    assert errors_of(await send_block(ring, block(B, position=6))) == {B: REFUSED}
    assert len(stream.sent) == before, "the stages lack a row of it"
    nobody = await send_block(ring, block(("nobody", 1)))
    assert not nobody.is_back, "nothing of it was on any stage when that failure came"


async def test_a_failure_is_told_once_and_the_first_one_counts(ring: Ring) -> None:
    trip = await send_block(ring, block(A))
    ring.answer(block(A))
    ring.fail(failure(A, StateLost("first")))
    ring.fail(failure(A))
    assert errors_of(trip) == {}
    assert errors_of(await send_block(ring, block(A, position=6))) == {A: STATE}
    assert not (await send_block(ring, block(A, position=7))).is_back


async def test_one_failure_ends_all_that_is_on_its_way_of_a_request(ring: Ring) -> None:
    trips = [await send_block(ring, chunk(A, position)) for position in range(3)]
    other = await send_block(ring, chunk(B))
    ring.fail(failure(A))
    assert [errors_of(trip) for trip in trips] == [{A: REFUSED}] * 3
    assert not other.is_back


# --------------------------------------------------------------------- several requests


async def test_what_fails_of_one_member_leaves_the_others_their_rows(ring: Ring) -> None:
    trip = await send_block(ring, block(A, B, C))
    ring.fail(failure(B, StateLost("no number")))
    ring.fail(failure(B))  # the next stage found it too
    assert not trip.is_back
    ring.answer(block(A, B, C))
    assert errors_of(trip) == {B: STATE}
    assert trip.block == block(A, B, C)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_what_the_generator_found_of_a_member_itself_stays_what_went_wrong_with_it(
    ring: Ring, is_lost: bool
) -> None:
    """It is told to the trip after `send`, before or after the loop's turn."""
    if is_lost:
        ring.lose(PeerLost("gone"))
    trip, own = ring.send(block(A, B)), NumericError("no numbers")
    trip.faults[A] = own
    await settled()
    ring.fail(failure(A))
    if not is_lost:
        assert not trip.is_back
        ring.answer(block(A, B))
    assert trip.is_back and trip.faults[A] is own
    assert (B in trip.faults) == is_lost


async def test_who_failed_in_between_takes_no_other_rows_round_and_the_others_are_lost(
    ring: Ring, stream: Stream
) -> None:
    """This stage computed a row of each: those of the others must not be missing elsewhere."""
    _ = await send_block(ring, block(A, B))
    ring.answer(block(A, B))
    ring.fail(failure(B))
    trip = await send_block(ring, block(A, B, position=6))
    assert errors_of(trip) == {A: LOST, B: REFUSED}
    assert "request b" in trip.faults[A].message
    assert stream.kinds == ["hidden"]
    alone = await send_block(ring, block(A, position=6))
    assert not alone.is_back and stream.kinds == ["hidden", "hidden"]


@pytest.mark.parametrize("over", [0, 1])
async def test_a_member_that_is_released_while_away_costs_the_others_nothing(
    ring: Ring, stream: Stream, over: int
) -> None:
    trip = await send_block(ring, block(A, B))
    ring.release((A, B)[over])
    await settled()
    assert not trip.is_back
    ring.answer(block(A, B))
    assert trip.is_back and trip.block == block(A, B)
    assert (A, B)[1 - over] not in trip.faults
    assert stream.kinds == ["hidden", "release"]


@pytest.mark.parametrize("over", [0, 1])
async def test_a_loss_is_told_at_once_to_who_shares_a_block_with_one_that_is_over(
    ring: Ring, over: int
) -> None:
    trip = await send_block(ring, block(A, B))
    ring.release((A, B)[over])
    await settled()
    ring.lose(PeerLost("gone"))
    assert trip.is_back, "it waits for the deadline"
    assert trip.faults[(A, B)[1 - over]].code == LOST


EVENTS = ("fail", "answer", "release", "late", "of another")
STORIES = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from((A, B, C))), max_size=12)


@given(STORIES)
def test_whatever_comes_a_shared_trip_is_back_once_with_a_row_or_a_fault_of_each_member(
    story: Sequence[tuple[str, Key]],
) -> None:
    async def play() -> None:
        ring = Ring("p1", "float32", HIDDEN)
        ring.connect(Stream())  # pyright: ignore[reportArgumentType]
        calls = list[bool]()
        ring.listen(lambda: calls.append(trip.is_back))
        trip = await send_block(ring, block(A, B, C))
        over, failed = set[Key](), set[Key]()
        for kind, key in story:
            was_back, before = trip.is_back, dict(trip.faults)
            match kind:
                case "fail":
                    ring.fail(failure(key))
                    failed |= set() if was_back else {key}
                case "answer":
                    ring.answer(block(A, B, C))
                case "release":
                    ring.release(key)
                    over.add(key)
                case "late":
                    ring._late(trip, 1.0)  # pyright: ignore[reportPrivateUsage]
                case _:
                    ring.answer(block(key, position=50))
                    ring.fail(failure((key[0], 2)))
            await settled()
            if was_back:
                assert trip.faults == before, "it is another thread's by now"
        ring.lose(PeerLost("gone"))
        assert calls == [True]
        assert failed <= trip.faults.keys()
        assert trip.block is not None or over | trip.faults.keys() == {A, B, C}

    asyncio.run(play())


# --------------------------------------------------------------------------------- losses


async def test_a_loss_fails_every_request_under_way_and_later_ones_until_connected_anew(
    ring: Ring,
) -> None:
    waiting, shared = await send_block(ring, block(A)), await send_block(ring, block(B, C))
    _ = await send_block(ring, block(("between", 1)))
    ring.answer(block(("between", 1)))
    ring.lose(PeerLost("gone"))
    assert errors_of(waiting) == {A: LOST} and errors_of(shared) == {B: LOST, C: LOST}
    later = await send_block(ring, block(("later", 1)))
    assert errors_of(later) == {("later", 1): LOST} and later.faults["later", 1].message == "gone"
    fresh: Any = Stream()
    ring.connect(fresh)
    # Its first rows went to the stage that is gone: the new one could only refuse the rest.
    between = await send_block(ring, block(("between", 1)))
    assert between.faults["between", 1].message == "gone"
    new = await send_block(ring, block(("new", 1)))
    assert fresh.kinds == ["hidden"]
    ring.answer(block(("new", 1)))
    assert errors_of(new) == {} and new.block is not None


async def test_every_request_is_told_of_a_loss_by_an_error_of_its_own(ring: Ring) -> None:
    """Its traceback holds on to the request's frames, and so to its caches."""
    trips = [await send_block(ring, block(A, B)), await send_block(ring, block(C))]
    ring.lose(PeerLost("gone"))
    trips.append(await send_block(ring, block(("later", 1), ("last", 1))))
    faults = [fault for trip in trips for fault in trip.faults.values()]
    assert len({id(fault) for fault in faults}) == len(faults) == 5


async def test_what_is_sent_as_the_peer_is_lost_is_not_waited_for(
    ring: Ring, stream: Stream
) -> None:
    trip = ring.send(block(A, B))
    ring.lose(PeerLost("gone"))  # before the loop had its turn
    await settled()
    assert errors_of(trip) == {A: LOST, B: LOST}
    assert stream.sent == []


async def test_connecting_anew_fails_what_was_under_way(ring: Ring, stream: Stream) -> None:
    trips = [await send_block(ring, block(A)), await send_block(ring, block(B, C))]
    fresh: Any = Stream()
    ring.connect(fresh)
    assert [errors_of(trip) for trip in trips] == [{A: LOST}, {B: LOST, C: LOST}]
    ring.release(A)
    _ = await send_block(ring, block(("new", 1)))
    assert stream.kinds == ["hidden"] * 2
    assert fresh.kinds == ["release", "hidden"]


async def test_before_the_stages_are_connected_a_request_fails() -> None:
    ring = Ring("p1", "float32", HIDDEN)
    for trip in (ring.send(block(A, B)), ring.ask_prefixes(C, [1], [1], [1])):
        await settled()
        assert set(errors_of(trip).values()) == {LOST}
        assert all("not connected" in fault.message for fault in trip.faults.values())
    ring.release(C)  # nobody to tell
    await settled()


# --------------------------------------------------------------------------------- chunks


async def test_a_chunk_is_back_when_all_stages_have_computed_it(ring: Ring, stream: Stream) -> None:
    first, second = await send_block(ring, chunk(A)), await send_block(ring, chunk(A, 1))
    other = await send_block(ring, chunk(B))
    assert [f.hidden.reply for f in stream.sent] == [pb.REPLY_COMPUTED] * 3
    for word in (computed(("a", 2)), computed(("nobody", 1)), computed(A, 7)):
        ring.computed(word)
    assert not any(trip.is_back for trip in (first, second, other))
    ring.computed(computed(A, 1))
    assert (first.is_back, second.is_back, other.is_back) == (False, True, False)
    ring.computed(computed(A, 1))  # once more: nobody waits for it
    ring.computed(computed(A))
    assert first.is_back and not other.is_back
    assert errors_of(first) == errors_of(second) == {} and first.block is None


async def test_nobody_waits_for_what_is_of_a_request_that_is_over(
    ring: Ring, stream: Stream
) -> None:
    chunks = [await send_block(ring, chunk(A, position)) for position in range(2)]
    question = ring.ask_prefixes(B, [1], [1], [1])
    other = await send_block(ring, chunk(("a", 2)))
    ring.release(A)
    ring.release(B)
    await settled()
    assert all(trip.is_back for trip in (*chunks, question)) and not other.is_back
    ring.computed(computed(A))
    ring.fail(failure(A))
    assert all(errors_of(trip) == {} for trip in (*chunks, question))
    assert stream.kinds[-2:] == ["release", "release"]


async def test_what_fails_of_a_request_that_is_over_is_kept_for_nobody(ring: Ring) -> None:
    for failed_first in (False, True):
        trip = await send_block(ring, block(A))
        ring.answer(block(A))
        assert errors_of(trip) == {}
        if failed_first:
            ring.fail(failure(A))
        ring.release(A)
        await settled()
        if not failed_first:
            ring.fail(failure(A))
        assert not (await send_block(ring, block(A))).is_back
        ring.answer(block(A))


# ------------------------------------------------------------------------------- prefixes


async def test_what_all_stages_keep_comes_round_and_is_lost_with_them(
    ring: Ring, stream: Stream
) -> None:
    prefix_trip = ring.ask_prefixes(A, [5, 6, 7], [2, 1], [2, 3])
    await settled()
    (frame,) = stream.sent
    query = frame.prefix
    assert (frame.placement, frame.request, frame.attempt) == ("p1", "a", 1)
    assert [list(query.tokens), list(query.schedule)] == [[5, 6, 7], [2, 1]]
    assert list(query.held) == [2, 3]
    ring.prefix(prefix_frame(B, [3]))
    ring.prefix(prefix_frame(("a", 2), [3]))
    assert not prefix_trip.is_back
    ring.prefix(prefix_frame(A, [2]))
    assert errors_of(prefix_trip) == {} and prefix_trip.prefix_rows == [2]
    ring.prefix(prefix_frame(A, [3]))
    assert prefix_trip.prefix_rows == [2], "nobody waits for a second one"
    late = ring.ask_prefixes(B, [5, 6, 7], [3], [3])
    await settled()
    ring.lose(PeerLost("gone"))
    assert errors_of(late) == {B: LOST} and late.prefix_rows == []
    ring.prefix(prefix_frame(B, [3]))
    assert late.prefix_rows == []


async def test_a_query_for_copies_comes_round_beside_nothing_and_is_lost_with_the_stages(
    ring: Ring, stream: Stream
) -> None:
    asked, agreed = ExactCopies((3, 7), (1, 2, 3), (0, 0)), ExactCopies((7,), (4, 5), (1,))
    trip = ring.ask_copies(A, asked)
    await settled()
    (frame,) = stream.sent
    assert (frame.placement, frame.request, frame.attempt) == ("p1", "a", 1)
    assert ExactCopies.from_wire(frame.copies) == asked
    for key in (B, ("a", 2)):
        ring.copies(pb.Frame(request=key[0], attempt=key[1], copies=agreed.to_wire()))
    ring.prefix(prefix_frame(A, [2]))
    assert not trip.is_back
    ring.copies(pb.Frame(request="a", attempt=1, copies=agreed.to_wire()))
    assert trip.is_back and errors_of(trip) == {} and trip.copies == agreed
    late = ring.ask_copies(B, asked)
    await settled()
    ring.lose(PeerLost("gone"))
    assert errors_of(late) == {B: LOST} and late.copies is None


# ------------------------------------------------------------------------------ deadlines


SLOW: dict[str, HiddenBlock | None] = {
    "a round that copies": replace(block(A), rows=8, data=bytes(8 * HIDDEN * 4), tokens=(1,) * 8),
    "a chunk": chunk(A),
    "the end of a prompt": block(A, reply=pb.REPLY_LAST),
    "a question": None,
}


def ask_or_send(ring: Ring, block_out: HiddenBlock | None) -> Trip:
    return ring.ask_prefixes(A, [1], [1], [1]) if block_out is None else ring.send(block_out)


@pytest.mark.parametrize("what", SLOW)
async def test_what_is_of_a_prompt_may_take_longer_than_a_round(
    ring: Ring, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "DECODE_DEADLINE_S", 0.01)
    slow, late = ask_or_send(ring, SLOW[what]), ring.send(block(B, C))
    await back(late)
    assert errors_of(late) == {B: LOST, C: LOST}
    assert all("did not answer" in fault.message for fault in late.faults.values())
    assert not slow.is_back


@pytest.mark.parametrize("what", SLOW)
async def test_what_is_of_a_prompt_is_a_lost_peer_by_a_deadline_of_its_own(
    ring: Ring, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "PREFILL_DEADLINE_S", 0.01)
    in_time, late, round_ = (
        ring.send(chunk(B)),
        ask_or_send(ring, SLOW[what]),
        ring.send(block(C)),
    )
    await settled()
    ring.computed(computed(B))
    await back(late)
    assert errors_of(late) == {A: LOST} and "did not answer" in late.faults[A].message
    assert errors_of(in_time) == {} and not round_.is_back


async def test_a_round_that_is_late_is_lost_for_all_its_members_and_later_answers_are_dropped(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "DECODE_DEADLINE_S", 0.01)
    trip = await send_block(ring, block(A, B))
    ring.fail(failure(A))
    await back(trip)
    assert errors_of(trip) == {A: REFUSED, B: LOST}
    ring.answer(block(A, B))
    assert trip.block is None


async def test_a_deadline_is_over_with_its_trip(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next one has the same name: a question, and the first chunk behind it."""
    monkeypatch.setattr(ring_module, "PREFILL_DEADLINE_S", 0.02)
    question = ring.ask_prefixes(A, [1], [1], [1])
    await settled()
    ring.prefix(prefix_frame(A, []))
    monkeypatch.setattr(ring_module, "PREFILL_DEADLINE_S", 60.0)
    first = await send_block(ring, chunk(A))
    await asyncio.sleep(0.06)
    assert errors_of(question) == {} and not first.is_back


async def test_requests_under_way_are_renewed_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that is slow must not cost an answer its state on the other stages."""
    monkeypatch.setattr(ring_module, "RENEW_S", 0.01)
    ring, fresh = Ring("p1", "float32", HIDDEN), Stream()
    for stream in (Stream(), fresh):  # the renewals go on, over the new stream
        ring.connect(stream)  # pyright: ignore[reportArgumentType]
    _ = await send_block(ring, block(A, B))
    ring.answer(block(A, B))
    ring.release(B)
    await settled()
    before = len(fresh.sent)
    async with asyncio.timeout(30):
        while len(fresh.sent) < before + 3:
            await asyncio.sleep(0.005)
    renewed = fresh.sent[before:]
    assert {(f.WhichOneof("kind"), f.request, f.attempt) for f in renewed} == {("renew", "a", 1)}


# --------------------------------------------------------------------------------- memory


class Name(str):
    """A request's, which tells whether anything still knows the request."""


Ending = Callable[[Ring, Key], object]
ENDINGS: dict[str, Ending] = {
    "answered": lambda ring, key: ring.answer(block(key, B)),
    "failed": lambda ring, key: [ring.fail(failure(each)) for each in (key, B)],
    "released": lambda ring, key: [ring.release(each) for each in (key, B)],
    "lost": lambda ring, _key: ring.lose(PeerLost("gone")),
    "connected anew": lambda ring, _key: ring.connect(Stream()),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("how", ENDINGS)
async def test_nothing_of_a_trip_that_is_back_is_kept_until_its_deadline(
    ring: Ring, how: str
) -> None:
    async def one() -> "weakref.ref[Name]":
        name = Name("r1")
        key: Key = (name, 1)
        trip = await send_block(ring, block(key, B))
        assert name in {member[0] for member in trip.members}
        _ = ENDINGS[how](ring, key)
        await settled()
        assert trip.is_back
        for each in (key, B):
            ring.release(each)
        await settled()
        ring.fail(failure(key))  # too late
        return weakref.ref(name)

    reference = await one()
    await settled()
    _ = gc.collect()
    assert reference() is None


class Cache:
    """Stands for what a request holds in memory."""


async def test_an_error_does_not_keep_a_requests_memory_alive(ring: Ring) -> None:
    ring.lose(PeerLost("gone"))

    async def one_request() -> "weakref.ref[Cache]":
        cache = Cache()
        reference = weakref.ref(cache)
        trip = await send_block(ring, block(A))
        with pytest.raises(ExoNodeError):
            raise trip.faults[A]
        return reference

    reference = await one_request()
    _ = gc.collect()
    assert reference() is None
