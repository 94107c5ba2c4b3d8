"""A stage's sessions: attempts are fenced, positions kept, rounds shared, state freed."""

import random
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from clocks import Clock
from models import make_checkpoint

from exo_node.placement.errors import (
    DeviceLost,
    ExoNodeError,
    InvalidFrame,
    NumericError,
    PeerLost,
    StateLost,
)
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine import stage as stage_module
from exo_node.shard.engine import stage_rounds
from exo_node.shard.engine.prefixes.store import PrefixStore
from exo_node.shard.engine.stage import StageOutput, StageWorker
from exo_node.shard.engine.states.groups import StageGroup
from exo_node.shard.model.open_model import open_model, read_layers
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.model.tensors import to_bytes
from exo_node.shard.pipeline import seen_attempts
from exo_node.shard.pipeline.frames import BlockMember, HiddenBlock, Replayed
from exo_node.shard.pipeline.link import Key

HIDDEN, LAYERS, FIRST = 64, 4, 2
ROW = HIDDEN * 4
EXPECTED = StageLimits(
    placement="p1",
    stage=1,
    dtype="float32",
    hidden_size=HIDDEN,
    max_rows=16,
    context_length=512,
    vocabulary=512,
)


@dataclass(slots=True)
class Stage:
    """The last layers of a tiny model, with a clock that stands still."""

    model: StageModel
    prefixes: PrefixStore | None = None
    clock: Clock = field(default_factory=Clock)
    worker: StageWorker = field(init=False)

    def __post_init__(self) -> None:
        self.worker = StageWorker(self.model, EXPECTED, self.clock, self.prefixes)

    def forward(
        self,
        position: int,
        rows: int,
        *,
        request: str = "r1",
        attempt: int = 1,
        reply: "pb.Reply.ValueType" = pb.REPLY_ALL,
    ) -> HiddenBlock:
        return output_of(self.worker.forward(block(position, rows, request, attempt, reply)))

    def round(self, *members: tuple[str, int]) -> list[bytes]:
        """A row of each of these requests, at these positions."""
        out = output_of(self.worker.forward(a_round(*members)))
        assert out.members == tuple(BlockMember(name, 1, position) for name, position in members)
        assert len(out.data) == len(members) * ROW
        return [out.data[i : i + ROW] for i in range(0, len(out.data), ROW)]

    def begin(self, **rows: int) -> None:
        """Requests with so many rows each."""
        for request, count in rows.items():
            _ = self.forward(0, count, request=request)


def rows_of(request: str, position: int, rows: int) -> bytes:
    """Rows that depend on the request and on where they stand, not on how they are cut."""
    seed = sum(request.encode())
    noise = [
        mx.random.normal((1, 1, HIDDEN), key=mx.random.key(1000 * seed + at))
        for at in range(position, position + rows)
    ]
    return to_bytes(mx.concatenate(noise, axis=1))


def block(
    position: int,
    rows: int,
    request: str = "r1",
    attempt: int = 1,
    reply: "pb.Reply.ValueType" = pb.REPLY_ALL,
) -> HiddenBlock:
    return HiddenBlock(
        members=(BlockMember(request, attempt, position),),
        rows=rows,
        tokens=tuple(range(position, position + rows)),
        reply=reply,
        data=rows_of(request, position, rows),
    )


def a_round(*members: tuple[str, int]) -> HiddenBlock:
    return HiddenBlock(
        members=tuple(BlockMember(request, 1, position) for request, position in members),
        rows=1,
        tokens=tuple(position for _, position in members),
        reply=pb.REPLY_ALL,
        data=b"".join(rows_of(request, position, 1) for request, position in members),
    )


def output_of(passed: StageOutput) -> HiddenBlock:
    """The block that leaves the stage; there must be no errors."""
    assert not passed.faults
    assert passed.block is not None
    return passed.block


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    """One family with attention only, one with recurrent layers; two layers, one of each kind."""
    folder: Path = tmp_path_factory.mktemp("stage") / request.param
    _ = make_checkpoint(folder, request.param, dtype="float32", layers=LAYERS, mtp=False)
    whole = open_model(folder)
    _ = read_layers(
        whole, FIRST, LAYERS, mx.float32, outer=False, progress=lambda _rows, _total: None
    )
    return StageModel(whole, FIRST, LAYERS)


@pytest.fixture
def stage(model: StageModel) -> Stage:
    return Stage(model)


def middle_of(model: StageModel) -> Stage:
    """A stage that is not the last: its one layer is the first of the two."""
    return Stage(StageModel(model.model, FIRST, FIRST + 1))


def fault_of(stage: Stage, block_in: HiddenBlock) -> Exception:
    """The error of a block of one request, which must not leave the stage."""
    passed = stage.worker.forward(block_in)
    assert passed.block is None
    ((key, fault),) = passed.faults
    assert key == block_in.members[0].key
    return fault


def refused(stage: Stage, position: int, rows: int, **changes: Any) -> str | None:
    """The field that an InvalidFrame names."""
    fault = fault_of(stage, block(position, rows, **changes))
    assert isinstance(fault, InvalidFrame)
    return fault.param


# ------------------------------------------------------------------- attempts and positions


def test_a_later_attempt_frees_the_earlier_ones_state_and_fences_it(stage: Stage) -> None:
    first = stage.forward(0, 5)
    bytes_before = stage.worker.cache_bytes()
    _ = stage.forward(5, 1)
    again = stage.forward(0, 5, attempt=2)
    assert again.data == first.data, "the new attempt did not begin from nothing"
    assert stage.worker.live_requests == 1
    assert stage.worker.cache_bytes() == bytes_before
    assert refused(stage, 6, 1) == "attempt"
    assert refused(stage, 0, 5) == "attempt"
    with pytest.raises(InvalidFrame):
        _ = stage.worker.cached_ends(("r1", 1), [1], [1], [1])
    assert stage.forward(5, 1, attempt=2).rows == 1


def test_an_earlier_attempts_late_release_leaves_the_later_one_alone(stage: Stage) -> None:
    _ = stage.forward(0, 5, attempt=2)
    stage.worker.release(("r1", 1))
    assert refused(stage, 0, 5) == "attempt"
    assert stage.worker.live_requests == 1
    assert stage.forward(5, 1, attempt=2).rows == 1


def test_a_released_request_refuses_late_frames_but_not_a_later_attempt(stage: Stage) -> None:
    _ = stage.forward(0, 5)
    stage.worker.release(("r1", 1))
    assert refused(stage, 5, 1) == "attempt"
    assert refused(stage, 0, 5) == "attempt"
    assert stage.worker.live_requests == 0
    assert stage.forward(0, 5, attempt=2).rows == 5


def test_release_may_come_twice_and_leaves_no_bytes(stage: Stage) -> None:
    stage.begin(r1=5, r2=3)
    assert stage.worker.cache_bytes() > 0
    for _ in range(2):
        stage.worker.release(("r1", 1))
        assert stage.worker.live_requests == 1
    stage.worker.release(("r2", 1))
    stage.worker.release(("never seen", 1))
    assert (stage.worker.live_requests, stage.worker.cache_bytes()) == (0, 0)


@pytest.mark.parametrize("position", [1, 4, 6, 500])
def test_a_block_must_begin_where_the_committed_rows_end(stage: Stage, position: int) -> None:
    _ = stage.forward(0, 5)
    assert refused(stage, position, 1) == "hidden.members.position"
    assert stage.forward(5, 1).rows == 1, "the refused block changed the session"


def test_a_request_that_does_not_begin_at_row_0_has_no_state(stage: Stage) -> None:
    """A loss and no fault of the frame: the answer goes on once its state is rebuilt."""
    fault = fault_of(stage, block(3, 1))
    assert isinstance(fault, PeerLost) and "no state of request r1" in fault.message
    assert stage.worker.live_requests == 0


def test_requests_that_run_are_not_forgotten_for_those_that_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_attempts, "REMEMBERED_REQUESTS", 4)
    _ = stage.forward(0, 2, attempt=3)
    for number in range(10):
        stage.worker.release((f"ended-{number}", 1))
    assert refused(stage, 0, 2, attempt=2) == "attempt"
    assert refused(stage, 0, 2, request="ended-9") == "attempt"
    assert stage.forward(0, 2, request="ended-0").rows == 2


# ------------------------------------------------------------------------ what is repeated


def repeats(request: str, position: int, *forwards: tuple[int, int]) -> HiddenBlock:
    """Forwards of (rows, kept) after `position` rows. Rows that do not stay are zeros."""
    data = b""
    for rows, count in forwards:
        data += rows_of(request, position, count) + bytes((rows - count) * ROW)
        position += count
    rows = sum(rows for rows, _ in forwards)
    return HiddenBlock(
        members=(BlockMember(request, 1, position - sum(count for _, count in forwards)),),
        rows=rows,
        tokens=tuple(range(rows)),
        reply=pb.REPLY_COMPUTED,
        data=data,
        replayed=tuple(Replayed(*forward) for forward in forwards),
    )


def test_rows_that_did_not_stay_are_as_if_they_had_never_been_written(stage: Stage) -> None:
    plain = Stage(stage.model)
    for each in (stage, plain):
        _ = each.forward(0, 5)
    _ = output_of(stage.worker.forward(repeats("r1", 5, (4, 1))))
    _ = plain.forward(5, 1)
    assert stage.forward(6, 2).data == plain.forward(6, 2).data
    assert refused(stage, 10, 1) == "hidden.members.position"


@pytest.mark.parametrize("middle", [False, True])
def test_forwards_that_are_repeated_by_one_block_are_those_of_several(
    model: StageModel, *, middle: bool
) -> None:
    forwards = [(1, 1), (4, 2), (3, 3), (2, 1)]
    begins = accumulate((count for _, count in forwards[:-1]), initial=5)
    blocks = [repeats("r1", *each) for each in zip(begins, forwards, strict=True)]
    together, apart = (middle_of(model) if middle else Stage(model) for _ in range(2))
    for stage in (together, apart):
        _ = stage.forward(0, 5)
    parts = [output_of(apart.worker.forward(each)).data for each in blocks]
    whole = output_of(together.worker.forward(repeats("r1", 5, *forwards)))
    assert whole.data == b"".join(parts)
    assert bool(whole.data) == middle
    assert together.forward(12, 1).data == apart.forward(12, 1).data


def test_a_middle_stage_passes_on_what_is_repeated_and_the_last_tells_that_it_was(
    model: StageModel,
) -> None:
    block_in = repeats("r1", 0, (3, 2), (2, 2))
    passed = output_of(middle_of(model).worker.forward(block_in))
    assert len(passed.data) == 5 * ROW and passed.data != block_in.data
    assert replace(passed, data=block_in.data) == block_in
    output = output_of(Stage(model).worker.forward(block_in))
    assert output.members == block_in.members
    assert (output.reply, output.data, output.tokens, output.replayed) == (
        pb.REPLY_COMPUTED,
        b"",
        (),
        (),
    )


# ---------------------------------------------------------------------------------- leases


def test_a_lease_ends_what_no_frame_touched(stage: Stage) -> None:
    _ = stage.forward(0, 5)
    stage.clock.now += 6
    _ = stage.forward(0, 3, request="r2")
    stage.clock.now += 6
    assert stage.worker.expire(12.0) == []
    assert stage.worker.expire(10.0) == ["r1"]
    assert stage.worker.live_requests == 1
    fault = fault_of(stage, block(5, 1))
    assert isinstance(fault, PeerLost) and "length of its lease" in fault.message
    _ = stage.forward(3, 2, request="r2")
    stage.clock.now += 9
    stage.worker.renew(("r2", 1))
    stage.worker.renew(("r2", 2))
    stage.worker.renew(("never seen", 1))
    stage.clock.now += 9
    assert stage.worker.expire(10.0) == [], "a forward and a renewal each renew it"
    stage.clock.now += 2
    stage.worker.renew(("r2", 2))
    assert stage.worker.expire(10.0) == ["r2"], "another attempt's renewal is none of it"
    assert stage.worker.cache_bytes() == 0


def test_a_round_renews_the_lease_of_each_that_shares_it(stage: Stage) -> None:
    stage.begin(r1=2, r2=3, r3=2)
    stage.clock.now += 9
    _ = stage.round(("r1", 2), ("r2", 3))
    stage.clock.now += 9
    assert stage.worker.expire(10.0) == ["r3"]


@pytest.mark.parametrize("is_round", [False, True])
def test_a_forward_that_takes_longer_than_a_lease_leaves_its_requests_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, is_round: bool
) -> None:
    """Evaluation is lazy: it is the conversion to bytes that takes the time."""

    def slowly(array: mx.array) -> bytes:
        stage.clock.now += 30
        return to_bytes(array)

    stage.begin(r1=1, r2=1)
    before = stage.clock.now
    with monkeypatch.context() as patched:
        patched.setattr(stage_rounds if is_round else stage_module, "to_bytes", slowly)
        block_in = a_round(("r1", 1), ("r2", 1)) if is_round else block(1, 5)
        _ = output_of(stage.worker.forward(block_in))
    assert stage.clock.now == before + 30
    assert stage.worker.expire(10.0) == ([] if is_round else ["r2"])


# ------------------------------------------------------------------------ what leaves it


def test_the_last_stage_sends_back_the_rows_that_were_asked_for(model: StageModel) -> None:
    whole = Stage(model).forward(0, 5)
    last = Stage(model).forward(0, 5, reply=pb.REPLY_LAST)
    assert (last.rows, last.tokens) == (1, (4,))
    assert last.members == whole.members, "it is matched by where the block began"
    assert last.data == whole.data[-ROW:]
    quiet, loud = Stage(model), Stage(model)
    confirmation = quiet.forward(0, 5, reply=pb.REPLY_COMPUTED)
    assert (confirmation.reply, confirmation.data, confirmation.tokens) == (
        pb.REPLY_COMPUTED,
        b"",
        (),
    )
    _ = loud.forward(0, 5)
    assert quiet.forward(5, 1) == loud.forward(5, 1)


# --------------------------------------------------------------------------------- rounds


def alone(model: StageModel, request: str, rows: int, count: int) -> list[bytes]:
    """The rows of rounds after so many rows, shared with nobody."""
    stage = Stage(model)
    stage.begin(**{request: rows})
    return [stage.round((request, rows + at))[0] for at in range(count)]


def test_rows_leave_in_the_order_of_the_block_whatever_that_of_the_group_is(
    model: StageModel,
) -> None:
    stage = Stage(model)
    stage.begin(r1=5, r2=2, r3=9)
    first, second = stage.round(("r1", 5), ("r2", 2), ("r3", 9)), dict[str, bytes]()
    turned = ("r3", 10), ("r1", 6), ("r2", 3)
    groups = stage.worker._rounds.groups.groups  # pyright: ignore[reportPrivateUsage]
    for (request, _), row in zip(turned, stage.round(*turned), strict=True):
        second[request] = row
    assert [session.key[0] for session in groups[0].requests] == ["r1", "r2", "r3"]
    for index, (request, rows) in enumerate((("r1", 5), ("r2", 2), ("r3", 9))):
        assert [first[index], second[request]] == alone(model, request, rows, 2)


def test_each_id_stands_by_its_own_row_in_a_forward_of_another_order(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only masks depend on ids, so no row of these models would show it."""
    calls, hidden = list[tuple[int, bytes]](), StageModel.hidden

    def noted(model: StageModel, tokens: mx.array, entering: mx.array, caches: Any) -> mx.array:
        rows = [to_bytes(entering[i : i + 1]) for i in range(tokens.shape[0])]
        ids: list[Any] = list(tokens[:, 0])
        calls.extend((int(id_.item()), row) for id_, row in zip(ids, rows, strict=True))
        return hidden(model, tokens, entering, caches)

    stage.begin(r1=5, r2=2)
    monkeypatch.setattr(StageModel, "hidden", noted)
    _ = stage.round(("r1", 5), ("r2", 2))
    _ = stage.round(("r2", 3), ("r1", 6))
    expected = [("r1", 5), ("r2", 2), ("r1", 6), ("r2", 3)]
    assert calls == [(position, rows_of(request, position, 1)) for request, position in expected]


def test_whoever_shares_rounds_in_whatever_order_each_has_its_own_rows(model: StageModel) -> None:
    chance, stage = random.Random(4), Stage(model)
    rows_of = {name: 1 + 3 * at for at, name in enumerate(("r1", "r2", "r3", "r4"))}
    stage.begin(**rows_of)
    got = {name: list[bytes]() for name in rows_of}
    for turn in range(24):
        chosen = chance.sample(sorted(rows_of), chance.randint(1, 4))
        members = [(name, rows_of[name] + len(got[name])) for name in chosen]
        for name, row in zip(chosen, stage.round(*members), strict=True):
            got[name].append(row)
        if turn == 12:
            stage.worker.release(("r4", 1))
            del rows_of["r4"]
    assert min(len(rows) for name, rows in got.items() if name in rows_of) > 8
    for name, rows in rows_of.items():
        assert got[name] == alone(model, name, rows, len(got[name]))
    for name in rows_of:
        stage.worker.release((name, 1))
    assert (stage.worker.live_requests, stage.worker.cache_bytes()) == (0, 0)


def test_layers_that_compute_no_batch_have_rounds_computed_one_request_at_a_time(
    model: StageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, hidden = list[int](), StageModel.hidden

    def no_batch(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        sizes.append(tokens.shape[0])
        if tokens.shape[0] > 1:
            raise TypeError("offset must be an int")
        return hidden(model, tokens, *rest)

    monkeypatch.setattr(StageModel, "hidden", no_batch)
    stage = Stage(model)
    stage.worker.begin_measuring().finish()
    assert 3 in sizes, "nothing was tried"
    stage.begin(r1=5, r2=2)
    rounds = [stage.round(("r2", 2 + at), ("r1", 5 + at)) for at in range(2)]
    assert [row for row, _ in rounds] == alone(model, "r2", 2, 2)
    assert [row for _, row in rounds] == alone(model, "r1", 5, 2)


def test_what_may_round_otherwise_is_said_of_shared_rounds_only_and_passed_on(
    stage: Stage,
) -> None:
    stage.begin(r1=2, r2=3)
    out = output_of(stage.worker.forward(a_round(("r1", 2), ("r2", 3))))
    assert not out.near_tie
    marked = replace(a_round(("r1", 3), ("r2", 4)), near_tie=True)
    assert output_of(stage.worker.forward(marked)).near_tie
    stage.worker._rounds.is_same = False  # pyright: ignore[reportPrivateUsage]
    assert output_of(stage.worker.forward(a_round(("r1", 4), ("r2", 5)))).near_tie
    assert not output_of(stage.worker.forward(a_round(("r1", 5)))).near_tie


# ----------------------------------------------------------- what goes wrong in a round


def faults_of(passed: StageOutput) -> dict[Key, Exception]:
    faults = dict(passed.faults)
    assert len(faults) == len(passed.faults), "somebody was told twice"
    return faults


OTHERS: dict[str, tuple[BlockMember, type[ExoNodeError], str]] = {
    "another position": (BlockMember("r2", 1, 5), InvalidFrame, "position is 5"),
    "an attempt that is over": (BlockMember("r2", 0, 3), InvalidFrame, "attempt 0"),
    "no state": (BlockMember("never seen", 1, 3), PeerLost, "no state"),
    "an attempt that has not begun": (BlockMember("r2", 2, 3), PeerLost, "no state"),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("what", OTHERS)
def test_one_that_is_refused_is_told_why_and_the_others_that_they_lost_the_forward(
    stage: Stage, what: str, place: int
) -> None:
    bad, kind, why = OTHERS[what]
    stage.begin(r1=2, r2=3, r3=4)
    members = [BlockMember("r1", 1, 2), BlockMember("r3", 1, 4)]
    members.insert(place, bad)
    shared = replace(a_round(("r1", 2), ("r2", 3), ("r3", 4)), members=tuple(members))
    passed = stage.worker.forward(shared)
    assert passed.block is None
    faults = faults_of(passed)
    assert faults.keys() == {member.key for member in members}
    for key, fault in faults.items():
        assert isinstance(fault, kind if key == bad.key else StateLost)
        assert (why if key == bad.key else bad.request) in str(fault)
    assert stage.round(("r1", 2), ("r3", 4), ("r2", 3)), "nothing was computed"


@pytest.mark.parametrize(
    "fault", [RuntimeError("[malloc] out of memory"), ValueError("shapes"), KeyError("offset")]
)
def test_a_shared_forward_that_fails_is_lost_to_each_of_its_requests_and_no_other(
    stage: Stage, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.begin(r1=2, r2=3, r3=4)
    _ = stage.round(("r1", 2), ("r2", 3))

    def failing(*_: object) -> mx.array:
        raise fault

    with monkeypatch.context() as patched:
        patched.setattr(StageModel, "hidden", failing)
        passed = stage.worker.forward(a_round(("r2", 4), ("r1", 3)))
    assert passed.block is None
    faults = faults_of(passed)
    assert faults.keys() == {("r1", 1), ("r2", 1)}
    assert all(isinstance(each, StateLost) for each in faults.values())
    assert len({id(each) for each in faults.values()}) == 2, "one error each"
    assert stage.worker.live_requests == 1
    assert stage.round(("r3", 4)) == alone(stage.model, "r3", 4, 1)
    assert refused(stage, 3, 1) == "attempt"
    again = stage.forward(0, 2, attempt=2)
    assert again.data == Stage(stage.model).forward(0, 2).data
    for key in (("r1", 2), ("r3", 1)):
        stage.worker.release(key)
    assert stage.worker.cache_bytes() == 0


@pytest.mark.parametrize("keeps_chunk", [False, True])
def test_want_of_memory_ends_the_process_where_a_shorter_chunk_may_help(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, keeps_chunk: bool
) -> None:
    stage.worker = StageWorker(stage.model, EXPECTED, stage.clock, keeps_chunk=keeps_chunk)

    def starved(*_: object) -> mx.array:
        raise RuntimeError("[malloc] Unable to allocate 34359738368 bytes.")

    monkeypatch.setattr(StageModel, "hidden", starved)
    with pytest.raises(RuntimeError if keeps_chunk else DeviceLost, match="Unable to allocate"):
        _ = stage.forward(0, 2)


def test_a_stage_whose_measurement_fails_shares_no_forwards_and_computes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> bool:
        raise AssertionError("odd")

    with monkeypatch.context() as patch:
        patch.setattr(stage_rounds, "probe_ids", failing)
        stage.worker.begin_measuring().finish()
    assert "AssertionError: odd" in stage.worker._rounds.batching_reason  # pyright: ignore[reportPrivateUsage]
    stage.begin(r1=2, r2=3)
    assert stage.worker.forward(a_round(("r1", 2), ("r2", 3))).block is not None


def test_a_forward_of_one_request_raises_what_it_raises(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> mx.array:
        raise RuntimeError("[malloc] out of memory")

    stage.begin(r1=2, r2=2)
    monkeypatch.setattr(StageModel, "hidden", failing)
    others = block(2, 3, request="r2"), block(0, 2, request="r3", reply=pb.REPLY_LAST)
    for block_in in (block(2, 1), *others):
        with pytest.raises(RuntimeError, match="out of memory"):
            _ = stage.worker.forward(block_in)
    # Nobody goes on with what a forward that failed has left.
    assert (stage.worker.live_requests, stage.worker.cache_bytes()) == (0, 0)


def failing_change(*_: object) -> None:
    raise RuntimeError("[malloc] out of memory")


def test_who_was_in_a_group_whose_change_failed_is_told_that_its_state_is_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that its frames are wrong, which would end the answer."""
    stage.begin(r1=2, r2=3, r3=4)
    _ = stage.round(("r1", 2), ("r2", 3), ("r3", 4))
    with monkeypatch.context() as patched:
        patched.setattr(StageGroup, "change", failing_change)
        faults = faults_of(stage.worker.forward(a_round(("r1", 3), ("r2", 4))))
    assert {("r1", 1), ("r2", 1)} <= faults.keys() <= {("r1", 1), ("r2", 1), ("r3", 1)}
    assert all(isinstance(each, StateLost) for each in faults.values())
    if ("r3", 1) not in faults:
        later = stage.worker.forward(a_round(("r3", 5)))
        assert later.block is not None or isinstance(later.faults[0][1], (StateLost, PeerLost))


def test_a_later_attempt_does_not_go_with_a_group_that_an_earlier_one_was_in(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.begin(r1=2, r2=3, r3=4)
    _ = stage.round(("r1", 2), ("r2", 3))
    _ = stage.forward(0, 2, attempt=2)  # of r1, whose old row stays in the group for a while
    with monkeypatch.context() as patched:
        patched.setattr(StageGroup, "change", failing_change)
        faults = faults_of(stage.worker.forward(a_round(("r2", 4), ("r3", 4))))
    assert faults.keys() >= {("r2", 1), ("r3", 1)}
    assert ("r1", 2) not in faults
    assert stage.forward(2, 1, attempt=2).rows == 1


# ---------------------------------------------------------------- numbers that are none

NAN = to_bytes(mx.full((1, 1, HIDDEN), float("nan")))


def with_nan(block_in: HiddenBlock, row: int) -> HiddenBlock:
    return replace(
        block_in, data=block_in.data[: row * ROW] + NAN + block_in.data[(row + 1) * ROW :]
    )


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_numbers_that_are_none_are_told_of_their_request_and_the_others_rows_continue(
    model: StageModel, bad: int
) -> None:
    for stage in (Stage(model), middle_of(model)):
        rows_of = {"r1": 2, "r2": 3, "r3": 4}
        stage.begin(**rows_of)
        passed = stage.worker.forward(with_nan(a_round(*rows_of.items()), bad))
        ((key, fault),) = passed.faults
        name = list(rows_of)[bad]
        assert key == (name, 1) and isinstance(fault, NumericError)
        assert f"at position {rows_of[name]}" in fault.message
        assert fault.message.startswith("stage 1 (")
        assert passed.block is not None
        data = passed.block.data
        rows = [data[i : i + ROW] for i in range(0, len(data), ROW)]
        others = Stage(stage.model)
        others.begin(**rows_of)
        for index, member in enumerate(rows_of.items()):
            if index != bad:
                assert [rows[index]] == others.round(member)


@pytest.mark.parametrize(
    ("reply", "rows", "middle"),
    [
        (pb.REPLY_ALL, 1, False),
        (pb.REPLY_ALL, 1, True),
        (pb.REPLY_LAST, 4, False),
        (pb.REPLY_LAST, 4, True),
        (pb.REPLY_COMPUTED, 4, True),
    ],
)
def test_nothing_leaves_of_one_request_whose_numbers_are_none(
    model: StageModel, reply: "pb.Reply.ValueType", rows: int, *, middle: bool
) -> None:
    stage = middle_of(model) if middle else Stage(model)
    stage.begin(r1=2)
    fault = fault_of(stage, with_nan(block(2, rows, reply=reply), rows - 1))
    assert isinstance(fault, NumericError)
    assert f"at position {1 + rows}" in fault.message


@pytest.mark.parametrize("is_round", [False, True])
def test_nobody_continues_from_what_was_kept_where_numbers_are_none(
    model: StageModel, *, is_round: bool
) -> None:
    """A damaged layer's kept states may be none as well."""
    prefixes = PrefixStore(64 << 20, model.make_caches)
    assert prefixes is not None
    stage = Stage(model, prefixes)
    cached_block = replace(block(0, 8, reply=pb.REPLY_COMPUTED), border=pb.BORDER_KEPT)
    _ = output_of(stage.worker.forward(cached_block))
    stage.begin(r2=2, r3=2)
    query = list(cached_block.tokens), [8], [8]
    assert stage.worker.cached_ends(("r4", 1), *query) == [8]
    block_in = a_round(("r2", 2), ("r3", 2)) if is_round else block(2, 1, "r2")
    assert faults_of(stage.worker.forward(with_nan(block_in, 0))).keys() == {("r2", 1)}
    assert stage.worker.cached_ends(("r4", 1), *query) == []
    assert stage.worker.prefix_cache_bytes == 0
