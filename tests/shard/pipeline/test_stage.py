"""A stage's sessions: attempts are fenced, positions kept, rows taken back, state freed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import mlx.core as mx
import pytest
from clocks import Clock
from models import make_checkpoint

from exo_node.placement.errors import InvalidFrame, PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel, open_model, read_layers
from exo_node.shard.model.tensors import to_bytes
from exo_node.shard.pipeline import seen_attempts
from exo_node.shard.pipeline import stage as stage_module
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.stage import StageWorker

HIDDEN, LAYERS, FIRST = 64, 4, 2
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
    clock: Clock = field(default_factory=Clock)
    worker: StageWorker = field(init=False)

    def __post_init__(self) -> None:
        self.worker = StageWorker(self.model, EXPECTED, self.clock)

    def forward(
        self,
        position: int,
        rows: int,
        *,
        request: str = "r1",
        attempt: int = 1,
        reply: "pb.Reply.ValueType" = pb.REPLY_ALL,
    ) -> HiddenBlock | None:
        out = self.worker.forward(block(position, rows, request, attempt, reply))
        assert len(out) <= 1
        return out[0] if out else None


def block(
    position: int,
    rows: int,
    request: str = "r1",
    attempt: int = 1,
    reply: "pb.Reply.ValueType" = pb.REPLY_ALL,
) -> HiddenBlock:
    """Rows that depend on the request and on where they stand, not on how they are cut."""
    seed = sum(request.encode())
    noise = [
        mx.random.normal((1, 1, HIDDEN), key=mx.random.key(1000 * seed + at))
        for at in range(position, position + rows)
    ]
    return HiddenBlock(
        request=request,
        attempt=attempt,
        position=position,
        rows=rows,
        tokens=tuple(range(position, position + rows)),
        reply=reply,
        data=to_bytes(mx.concatenate(noise, axis=1)),
    )


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    """One family with attention only, one with recurrent layers; two layers, one of each kind."""
    folder: Path = tmp_path_factory.mktemp("stage") / request.param
    _ = make_checkpoint(folder, request.param, dtype="float32", layers=LAYERS, mtp=False)
    whole = open_model(folder)
    _ = read_layers(
        whole, FIRST, LAYERS, mx.float32, outer=False, progress=lambda _done, _total: None
    )
    return StageModel(whole, FIRST, LAYERS)


@pytest.fixture
def stage(model: StageModel) -> Stage:
    return Stage(model)


def refused(call: Callable[[], object]) -> str | None:
    """The field that an InvalidFrame names."""
    with pytest.raises(InvalidFrame) as caught:
        _ = call()
    return caught.value.param


def test_a_later_attempt_frees_the_earlier_ones_state_and_fences_it(stage: Stage) -> None:
    first = stage.forward(0, 5)
    held = stage.worker.cache_bytes()
    _ = stage.forward(5, 1)
    again = stage.forward(0, 5, attempt=2)
    assert again is not None and first is not None
    assert again.data == first.data, "the new attempt did not begin from nothing"
    assert stage.worker.live_requests == 1
    assert stage.worker.cache_bytes() == held
    assert refused(lambda: stage.forward(6, 1)) == "attempt"
    assert refused(lambda: stage.forward(0, 5)) == "attempt"
    assert refused(lambda: stage.worker.rollback("r1", 1, 4)) == "attempt"
    assert stage.forward(5, 1, attempt=2) is not None


def test_an_earlier_attempts_late_release_leaves_the_later_one_alone(stage: Stage) -> None:
    _ = stage.forward(0, 5, attempt=2)
    stage.worker.release("r1", 1)
    assert refused(lambda: stage.forward(0, 5)) == "attempt"
    assert stage.worker.live_requests == 1
    assert stage.forward(5, 1, attempt=2) is not None


def test_a_released_request_refuses_late_frames_but_not_a_later_attempt(stage: Stage) -> None:
    _ = stage.forward(0, 5)
    stage.worker.release("r1", 1)
    assert refused(lambda: stage.forward(5, 1)) == "attempt"
    assert refused(lambda: stage.forward(0, 5)) == "attempt"
    assert stage.worker.live_requests == 0
    assert stage.forward(0, 5, attempt=2) is not None


def test_a_release_that_overtakes_the_first_frame_is_remembered(stage: Stage) -> None:
    stage.worker.release("r1", 1)
    assert refused(lambda: stage.forward(0, 5)) == "attempt"


def test_release_may_come_twice_and_leaves_no_bytes(stage: Stage) -> None:
    _ = stage.forward(0, 5)
    _ = stage.forward(0, 3, request="r2")
    assert stage.worker.cache_bytes() > 0
    for _ in range(2):
        stage.worker.release("r1", 1)
        assert stage.worker.live_requests == 1
    stage.worker.release("r2", 1)
    stage.worker.release("never seen", 1)
    assert (stage.worker.live_requests, stage.worker.cache_bytes()) == (0, 0)


def test_a_later_attempt_begins_anew_and_frees_what_the_one_before_held(stage: Stage) -> None:
    _ = stage.forward(0, 5)
    assert stage.worker.held("r1", 2, [1, 2, 3], [2, 1], [2]) == [], "it keeps no prefixes"
    assert (stage.worker.live_requests, stage.worker.cache_bytes()) == (1, 0)
    assert refused(lambda: stage.forward(5, 1, attempt=1)) == "attempt"
    assert stage.forward(0, 5, attempt=2) is not None


@pytest.mark.parametrize("position", [1, 4, 6, 500])
def test_a_block_must_begin_where_the_committed_rows_end(stage: Stage, position: int) -> None:
    _ = stage.forward(0, 5)
    assert refused(lambda: stage.forward(position, 1)) == "hidden.position"
    assert stage.forward(5, 1) is not None, "the refused block changed the session"


def test_a_request_that_does_not_begin_at_row_0_has_no_state(stage: Stage) -> None:
    """A loss and no fault of the frame: the answer goes on once its state is rebuilt."""
    with pytest.raises(PeerLost, match="no state of request r1"):
        _ = stage.forward(3, 1)
    with pytest.raises(PeerLost, match="no state of request r1"):
        stage.worker.rollback("r1", 1, 0)
    assert stage.worker.live_requests == 0


def test_rows_are_taken_back_as_if_they_had_never_been_written(stage: Stage) -> None:
    plain = Stage(stage.model)
    for each in (stage, plain):
        _ = each.forward(0, 5)
    _ = stage.forward(5, 4)
    stage.worker.rollback("r1", 1, 6)
    _ = plain.forward(5, 1)
    wanted, got = plain.forward(6, 2), stage.forward(6, 2)
    assert wanted is not None and got is not None
    assert got.data == wanted.data


@pytest.mark.parametrize("position", [4, 5, 9, 10, 2**40])
def test_a_rollback_reaches_only_into_the_last_block(stage: Stage, position: int) -> None:
    _ = stage.forward(0, 5)
    _ = stage.forward(5, 4)
    if position == 5:
        stage.worker.rollback("r1", 1, position)  # the whole block, and no more
        assert stage.forward(5, 1) is not None
        return
    assert refused(lambda: stage.worker.rollback("r1", 1, position)) == "rollback.position"
    assert stage.forward(9, 1) is not None, "the refused rollback changed the session"


def test_a_block_is_rolled_back_once(stage: Stage) -> None:
    _ = stage.forward(0, 5)
    _ = stage.forward(5, 4)
    stage.worker.rollback("r1", 1, 7)
    assert refused(lambda: stage.worker.rollback("r1", 1, 6)) == "rollback.position"


def test_a_lease_ends_what_no_frame_touched(stage: Stage) -> None:
    _ = stage.forward(0, 5)
    stage.clock.now += 6
    _ = stage.forward(0, 3, request="r2")
    stage.clock.now += 6
    assert stage.worker.expire(12.0) == []
    assert stage.worker.expire(10.0) == ["r1"]
    assert stage.worker.live_requests == 1
    with pytest.raises(PeerLost, match="length of its lease"):
        _ = stage.forward(5, 1)
    _ = stage.forward(3, 2, request="r2")
    stage.clock.now += 9
    stage.worker.rollback("r2", 1, 4)
    stage.clock.now += 9
    stage.worker.renew("r2", 1)
    stage.worker.renew("r2", 2)
    stage.worker.renew("never seen", 1)
    stage.clock.now += 9
    assert stage.worker.expire(10.0) == [], "a forward, a rollback and a renewal each renew it"
    stage.clock.now += 2
    assert stage.worker.expire(10.0) == ["r2"]
    assert stage.worker.cache_bytes() == 0


def test_a_forward_that_takes_longer_than_a_lease_leaves_its_request_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation is lazy: it is the conversion to bytes that takes the time."""

    def slowly(array: mx.array) -> bytes:
        stage.clock.now += 30
        return to_bytes(array)

    monkeypatch.setattr(stage_module, "to_bytes", slowly)
    _ = stage.forward(0, 5)
    assert stage.worker.expire(10.0) == []


def test_interleaved_requests_equal_solo_runs(model: StageModel) -> None:
    def play(stage: Stage, turns: Sequence[tuple[str, int, int]]) -> dict[str, list[bytes]]:
        out: dict[str, list[bytes]] = {}
        for request, position, rows in turns:
            answer = stage.forward(position, rows, request=request)
            assert answer is not None
            out.setdefault(request, []).append(answer.data)
        return out

    one = [("r1", 0, 6), ("r1", 6, 1), ("r1", 7, 3), ("r1", 10, 1)]
    two = [("r2", 0, 2), ("r2", 2, 5), ("r2", 7, 1), ("r2", 8, 1)]
    mixed = [turn for turn in chain(*zip_longest(one, two)) if turn is not None]
    assert play(Stage(model), mixed) == play(Stage(model), one) | play(Stage(model), two)


def test_the_last_stage_sends_back_the_rows_that_were_asked_for(model: StageModel) -> None:
    whole = Stage(model).forward(0, 5)
    last = Stage(model).forward(0, 5, reply=pb.REPLY_LAST)
    assert whole is not None and last is not None
    assert (last.position, last.rows, last.tokens) == (4, 1, (4,))
    assert last.data == whole.data[-HIDDEN * 4 :]
    quiet = Stage(model)
    assert quiet.forward(0, 5, reply=pb.REPLY_NONE) is None
    after, wanted = quiet.forward(5, 1), Stage(model)
    _ = wanted.forward(0, 5)
    assert after == wanted.forward(5, 1)


def test_a_middle_stage_passes_every_row_on(model: StageModel) -> None:
    middle = Stage(StageModel(model.model, FIRST, FIRST + 1))
    for position, reply in ((0, pb.REPLY_NONE), (3, pb.REPLY_LAST), (6, pb.REPLY_ALL)):
        out = middle.forward(position, 3, reply=reply)
        assert out is not None
        assert (out.position, out.rows, len(out.data)) == (position, 3, 3 * HIDDEN * 4)


def test_requests_that_run_are_not_forgotten_for_those_that_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_attempts, "REMEMBERED_REQUESTS", 4)
    _ = stage.forward(0, 2, attempt=3)
    for number in range(10):
        stage.worker.release(f"ended-{number}", 1)
    assert refused(lambda: stage.forward(0, 2, attempt=2)) == "attempt"
    assert refused(lambda: stage.forward(0, 2, request="ended-9")) == "attempt"
    assert stage.forward(0, 2, request="ended-0") is not None
