"""A stage after the generator: what comes of the frames of one stream, here, on and back up."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import pytest

from exo_node.placement.errors import ExoNodeError, InvalidFrame, PeerLost, StateLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.stage import StageOutput
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.pipeline.copy_query import ExactCopies
from exo_node.shard.pipeline.frames import BlockMember, HiddenBlock, cut
from exo_node.shard.pipeline.link import Key
from exo_node.shard.runner.stage_service import CHUNKS_AHEAD, ROWS_AHEAD
from exo_node.shard.runner.worker_service import WorkerService

HIDDEN = 4
STAGES = 3
LIMITS = StageLimits("p1", 1, "float32", HIDDEN, 8, 64, 512)


class Worker:
    """Writes down what it computes."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.ended: list[Key] = []
        self.renewed: list[Key] = []
        self.faults: dict[Key, Exception] = {}
        """Errors of a block's members; the block is sent nevertheless."""
        self.raises: BaseException | None = None

    def forward(self, block: HiddenBlock) -> StageOutput:
        if self.raises is not None:
            raise self.raises
        self.log += [(member.request, member.position) for member in block.members]
        faults = [(m.key, self.faults[m.key]) for m in block.members if m.key in self.faults]
        return StageOutput(None if len(faults) == len(block.members) else block, faults)

    def cached_ends(
        self, key: Key, tokens: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        if self.raises is not None:
            raise self.raises
        assert (key, list(tokens), list(schedule)) == (("r1", 1), [1, 2, 3], [2, 1])
        return list(ends)[:1]

    def agree_on_copies(self, key: Key, asked: ExactCopies) -> ExactCopies:
        if self.raises is not None:
            raise self.raises
        assert key == ("r1", 1)
        return asked.with_stage(ExactCopies((7,), (1, 2), (0,)))

    def release(self, key: Key) -> None:
        self.ended.append(key)

    def renew(self, key: Key) -> None:
        self.renewed.append(key)


class Compute:
    """Runs nothing before it is told to."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def post(self, run: Callable[[], None]) -> None:
        self._jobs.append(run)

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


class Following:
    """The next stage."""

    def __init__(self) -> None:
        self.frames: list[pb.Frame] = []

    def send(self, frames: list[pb.Frame]) -> None:
        self.frames += frames


class Stage:
    def __init__(self, stage: int = 1) -> None:
        self.worker, self.compute, self.following = Worker(), Compute(), Following()
        parts: list[Any] = [self.following, self.compute, self.worker]
        spec = pb.StageSpec(placement="p1", stage=stage, num_stages=STAGES)
        self.service = WorkerService(spec, LIMITS, *parts)

    def take(self, frames: Iterable[pb.Frame], *, computes: bool = True) -> list[pb.Frame]:
        """Frames that are sent back; all is computed once the last frame is read."""

        async def stream() -> AsyncIterator[pb.Frame]:
            for frame in frames:
                yield frame
                await asyncio.sleep(0)
                if computes:
                    self.compute.run()
                    await asyncio.sleep(0)

        async def run() -> list[pb.Frame]:
            context: Any = None
            async with asyncio.timeout(30):
                up = [frame async for frame in self.service.Stream(stream(), context)]
            self.compute.run()
            await asyncio.sleep(0)
            return up

        return asyncio.run(run())


def frames_of(block: HiddenBlock) -> list[pb.Frame]:
    return list(cut(block, LIMITS.placement, LIMITS.stage, LIMITS.dtype, HIDDEN))


def chunks(request: str, count: int) -> Iterable[pb.Frame]:
    for at in range(count):
        members = (BlockMember(request, 1, at),)
        yield from frames_of(HiddenBlock(members, 1, (1,), pb.REPLY_COMPUTED, bytes(4 * HIDDEN)))


def a_round(*names: str, position: int = 1) -> HiddenBlock:
    members = tuple(BlockMember(name, 1, position) for name in names)
    count = len(names)
    return HiddenBlock(members, 1, (1,) * count, pb.REPLY_ALL, bytes(4 * HIDDEN * count))


def word(request: str, **kind: Any) -> pb.Frame:
    return pb.Frame(placement="p1", request=request, attempt=1, **kind)


def failures(up: Iterable[pb.Frame]) -> dict[str, str]:
    """The failures: their codes by request."""
    frames = list(up)
    assert all(frame.failure.stage == 1 and frame.attempt == 1 for frame in frames)
    codes = {frame.request: frame.failure.code for frame in frames}
    assert len(codes) == len(frames)
    return codes


def test_chunks_of_a_request_that_is_over_leave_room_for_others() -> None:
    """The most chunks wait that may, and none is computed."""
    stage, most = Stage(), STAGES + CHUNKS_AHEAD

    def frames() -> Iterable[pb.Frame]:
        yield from chunks("over", most)
        yield word("over", release=pb.Release())
        yield from chunks("other", most)

    assert stage.take(frames(), computes=False) == []
    assert stage.worker.log == [("other", at) for at in range(most)]
    assert stage.worker.ended == [("over", 1)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_was_computed_leaves_room_for_more_whatever_came_of_it(*, is_refused: bool) -> None:
    stage, count = Stage(), 2 * ROWS_AHEAD
    if is_refused:
        stage.worker.faults["a", 1] = InvalidFrame("no", param="hidden.members.position")
    rounds = [frame for at in range(count) for frame in frames_of(a_round("a", position=at))]
    up = stage.take([*rounds, *chunks("p", 2 * STAGES + 2 * CHUNKS_AHEAD)])
    assert len(stage.worker.log) == count + 2 * STAGES + 2 * CHUNKS_AHEAD
    assert len(up) == (count if is_refused else 0)


def test_no_more_rounds_are_read_than_may_wait() -> None:
    """gRPC's flow control holds the rest, and chunks have places of their own."""
    stage = Stage()
    service, ends = stage.service, list[int]()

    async def stream() -> AsyncIterator[pb.Frame]:
        for frame in chunks("p", STAGES + CHUNKS_AHEAD):
            yield frame
        for at in range(ROWS_AHEAD + 5):
            ends.append(at)
            yield frames_of(a_round("a", position=at))[0]

    async def run() -> None:
        context: Any = None

        async def read() -> None:
            async for _ in service.Stream(stream(), context):
                pass

        reader = asyncio.create_task(read())
        for _ in range(500):
            await asyncio.sleep(0)
        assert len(ends) == ROWS_AHEAD + 1, "one is held, for which there is no room"
        stage.compute.run()
        async with asyncio.timeout(30):
            await reader

    asyncio.run(run())
    assert len(ends) == ROWS_AHEAD + 5


def test_what_went_wrong_with_one_member_is_told_and_the_block_continues() -> None:
    stage = Stage()
    stage.worker.faults["b", 1] = StateLost("no numbers")
    assert failures(stage.take(frames_of(a_round("a", "b", "c")))) == {"b": StateLost("").code}
    (frame,) = stage.following.frames
    assert len(frame.hidden.members) == 3


def test_a_block_that_was_refused_is_told_to_each_of_its_members_and_goes_nowhere() -> None:
    stage = Stage()
    refused = InvalidFrame("no", param="hidden.members.position")
    lost = StateLost("request b, of the same forward, was refused")
    stage.worker.faults = {("a", 1): lost, ("b", 1): refused, ("c", 1): lost}
    up = stage.take(frames_of(a_round("a", "b", "c")))
    assert failures(up) == {"a": lost.code, "b": refused.code, "c": lost.code}
    assert [frame.failure.param for frame in up] == ["", "hidden.members.position", ""]
    assert stage.following.frames == []


@pytest.mark.parametrize(
    "fault", [RuntimeError("[malloc] out of memory"), PeerLost("no state"), SystemExit(1)]
)
def test_what_a_forward_raises_is_told_to_all_that_it_was_of(fault: BaseException) -> None:
    stage = Stage()
    stage.worker.raises = fault
    up = stage.take(frames_of(a_round("a", "b")))
    code = fault.code if isinstance(fault, ExoNodeError) else ExoNodeError("").code
    assert failures(up) == {"a": code, "b": code}
    assert stage.following.frames == []
    stage.worker.raises = None
    assert stage.take(frames_of(a_round("a", "b"))) == [], "it goes on"


def test_a_frame_that_is_refused_is_told_to_each_of_its_members() -> None:
    stage = Stage()
    (frame,) = frames_of(a_round("a", "b"))
    frame.hidden.shape[2] = HIDDEN + 1
    up = stage.take([frame, *frames_of(a_round("c"))])
    assert failures(up) == dict.fromkeys("ab", InvalidFrame("", param="x").code)
    assert {each.failure.param for each in up} == {"hidden.shape"}
    assert stage.worker.log == [("c", 1)], "the good frame behind it was not taken"


@pytest.mark.parametrize("kind", ["failure", "computed"])
def test_a_frame_of_a_kind_that_only_the_generator_takes_is_refused(kind: str) -> None:
    stage = Stage()
    frames = {"failure": pb.Failure(code="x"), "computed": pb.Computed(position=1)}
    up = stage.take([word("a", **{kind: frames[kind]})])
    assert [frame.failure.param for frame in up] == ["kind"]


def test_a_question_continues_with_what_this_stage_keeps() -> None:
    stage = Stage()
    query = pb.PrefixQuery(tokens=[1, 2, 3], schedule=[2, 1], held=[2, 3])
    assert stage.take([word("r1", prefix=query)]) == []
    (frame,) = stage.following.frames
    assert list(frame.prefix.held) == [2] and list(frame.prefix.tokens) == [1, 2, 3]
    stage.worker.raises = InvalidFrame("an old attempt", param="attempt")
    up = stage.take([word("r1", prefix=query)])
    assert [each.failure.param for each in up] == ["attempt"]
    assert len(stage.following.frames) == 1


def test_a_query_for_copies_continues_with_what_this_stage_computes_exactly() -> None:
    stage = Stage()
    query = ExactCopies((3, 7), (1, 2, 3), (0, 0)).to_wire()
    assert stage.take([word("r1", copies=query)]) == []
    (frame,) = stage.following.frames
    assert ExactCopies.from_wire(frame.copies) == ExactCopies((7,), (2, 5), (0,))
    stage.worker.raises = InvalidFrame("an old attempt", param="attempt")
    up = stage.take([word("r1", copies=query)])
    assert [each.failure.param for each in up] == ["attempt"]
    assert len(stage.following.frames) == 1
    (refused,) = stage.take([word("r1", copies=pb.CopyQuery(lengths=[3]))])
    assert refused.failure.param == "copies.verify_s"


@pytest.mark.parametrize("number", [1, 2])
def test_releases_and_renewals_are_done_here_and_passed_on_to_the_last_stage(number: int) -> None:
    """Behind which is the generator, who knows."""
    stage = Stage(number)
    stage.take([word("a", renew=pb.Renew()), word("b", release=pb.Release())])
    assert (stage.worker.renewed, stage.worker.ended) == ([("a", 1)], [("b", 1)])
    kinds = [frame.WhichOneof("kind") for frame in stage.following.frames]
    assert kinds == ([] if number == STAGES - 1 else ["renew", "release"])


def test_a_release_waits_for_its_requests_round() -> None:
    stage = Stage()
    order = list[str]()
    forward, release = stage.worker.forward, stage.worker.release

    def computed(block: HiddenBlock) -> StageOutput:
        order.append(block.members[0].request)
        return forward(block)

    def released(key: Key) -> None:
        order.append("release")
        release(key)

    stage.worker.forward, stage.worker.release = computed, released
    frames = [*chunks("p", 1), *frames_of(a_round("a")), word("a", release=pb.Release())]
    assert stage.take(frames, computes=False) == []
    assert order == ["a", "release", "p"]
