"""Copies of a stage's requests on a spare: checked, paced, and bit for bit what was copied."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import pytest
from clocks import Clock
from mlx_lm.models.cache import RotatingKVCache
from models import make_checkpoint

from exo_node.placement.errors import InvalidFrame, PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel, open_model, read_layers
from exo_node.shard.model.tensors import to_bytes
from exo_node.shard.pipeline import state_sender as copier_module
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.stage import StageWorker
from exo_node.shard.pipeline.state_sender import EVERY_S, StateSender
from exo_node.shard.pipeline.state_store import StateStore, why_not_copied

HIDDEN, LAYERS = 64, 4
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
class Pair:
    """A stage at work and its spare, with the wire between them cut out but for the bytes."""

    model: StageModel
    clock: Clock = field(default_factory=Clock)
    tick: float = 1.0
    """Seconds from one forward to the next: enough for a copy of each."""
    sent: list[pb.StateCopy] = field(default_factory=list[pb.StateCopy])
    holds: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    arrives: bool = True
    state_sender: StateSender = field(init=False)
    copies: StateStore = field(init=False)
    leader: StageWorker = field(init=False)
    spare: StageWorker = field(init=False)

    def __post_init__(self) -> None:
        self.state_sender = StateSender(self.model, EXPECTED, self.clock, self.send, self.hold)
        self.state_sender.follow(following=True)
        self.copies = StateStore(self.model, EXPECTED, self.clock)
        self.leader = StageWorker(self.model, EXPECTED, self.clock, self.state_sender)
        self.spare = StageWorker(self.model, EXPECTED, self.clock, copies=self.copies)

    def send(self, copy: pb.StateCopy) -> None:
        self.sent.append(pb.StateCopy.FromString(copy.SerializeToString()))
        if self.arrives:
            self.copies.keep(self.sent[-1])
            self.state_sender.delivered(0.0)

    def hold(self, names: tuple[str, ...]) -> None:
        self.holds.append(names)
        self.copies.hold(names)

    def adopt(self, position: int) -> tuple[int, HiddenBlock | None]:
        """The spare takes the stage's place; that one goes on, to be compared with."""
        self.state_sender.follow(following=False)
        return self.spare.adopt("r1", 2, position)

    def forward(
        self,
        worker: StageWorker,
        position: int,
        rows: int,
        *,
        attempt: int = 1,
        request: str = "r1",
        reply: "pb.Reply.ValueType" = pb.REPLY_ALL,
        other: int = 0,
    ) -> list[HiddenBlock]:
        self.clock.now += self.tick
        return worker.forward(block(position, rows, request, attempt, reply, other))


def block(
    position: int,
    rows: int,
    request: str = "r1",
    attempt: int = 1,
    reply: "pb.Reply.ValueType" = pb.REPLY_ALL,
    other: int = 0,
) -> HiddenBlock:
    """Rows that depend on where they stand; another `other`, other rows."""
    keys = [mx.random.key(1000 * other + at) for at in range(position, position + rows)]
    noise = [mx.random.normal((1, 1, HIDDEN), key=key) for key in keys]
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
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    """One family with attention only, one with recurrent layers; its last two layers."""
    folder: Path = tmp_path_factory.mktemp("copies") / request.param
    _ = make_checkpoint(folder, request.param, dtype="float32", layers=LAYERS, mtp=False)
    model = open_model(folder)
    _ = read_layers(model, 0, LAYERS, mx.float32, outer=False, progress=lambda _done, _total: None)
    return StageModel(model, 2, LAYERS)


@pytest.fixture(params=["middle", "last"])
def pair(whole: StageModel, request: pytest.FixtureRequest) -> Pair:
    """Of layers in the middle, which send rows on and keep a trail, and of the last ones."""
    return Pair(StageModel(whole.model, 1, 3) if request.param == "middle" else whole)


@pytest.fixture
def last(whole: StageModel) -> Pair:
    return Pair(whole)


def datas(blocks: list[HiddenBlock]) -> list[bytes]:
    return [each.data for each in blocks]


def refused(call: Callable[[], object]) -> str | None:
    with pytest.raises(InvalidFrame) as caught:
        _ = call()
    return caught.value.param


def test_a_spare_goes_on_behind_the_last_copy_with_the_same_bits(pair: Pair) -> None:
    _ = pair.forward(pair.leader, 0, 9)
    for row in range(9, 14):
        _ = pair.forward(pair.leader, row, 1)
    assert pair.adopt(14) == (14, None)
    for row in range(14, 18):
        wanted = pair.forward(pair.leader, row, 1)
        assert datas(pair.forward(pair.spare, row, 1, attempt=2)) == datas(wanted)
    assert [copy.begin for copy in pair.sent[:3]] == [0, 9, 10], "only what is new is sent again"
    assert pair.copies.bytes == 0, "what was taken up is kept once"


def test_long_contexts_are_joined_from_many_copies(pair: Pair) -> None:
    """Buffers grow by 256 rows: the joined ones have as much room as those that were copied."""
    for position in range(0, 304, 16):
        _ = pair.forward(pair.leader, position, 16)
    assert pair.adopt(304) == (304, None)
    wanted = pair.forward(pair.leader, 304, 1)
    assert datas(pair.forward(pair.spare, 304, 1, attempt=2)) == datas(wanted)


def test_a_copy_ahead_of_the_answers_reader_gives_way_to_the_one_before_it(pair: Pair) -> None:
    _ = pair.forward(pair.leader, 0, 9)
    wanted = [pair.forward(pair.leader, row, 1) for row in range(9, 12)]
    assert pair.sent[-1].position == 12
    assert pair.spare.adopt("r1", 2, 11) == (11, None)
    again = Pair(pair.model)
    _ = again.forward(again.leader, 0, 9)
    _ = again.forward(again.leader, 9, 3)
    assert again.spare.adopt("r1", 2, 11) == (9, None), "two copies were there: 9 rows and 12"
    rebuilt = [replace(block(row, 1, attempt=2), rebuilds=True) for row in (9, 10)]
    _ = [again.spare.forward(each) for each in rebuilt]
    assert datas(again.forward(again.spare, 11, 1, attempt=2)) == datas(wanted[2])
    assert datas(pair.forward(pair.spare, 11, 1, attempt=2)) == datas(wanted[2])


def test_where_both_copies_are_ahead_the_spare_begins_anew(pair: Pair) -> None:
    _ = pair.forward(pair.leader, 0, 9)
    _ = pair.forward(pair.leader, 9, 1)
    assert pair.spare.adopt("r1", 2, 8) == (0, None)


def test_rows_that_were_taken_back_are_copied_anew(pair: Pair) -> None:
    """Other rows took their place; the copy of 9 rows and that of 12 are of an old story."""
    _ = pair.forward(pair.leader, 0, 9)
    _ = pair.forward(pair.leader, 9, 3)
    pair.leader.rollback("r1", 1, 10)
    _ = pair.forward(pair.leader, 10, 1, other=1)
    assert [(copy.begin, copy.position) for copy in pair.sent[-2:]] == [(9, 12), (10, 11)]
    assert pair.adopt(11) == (11, None)
    wanted = pair.forward(pair.leader, 11, 1)
    assert datas(pair.forward(pair.spare, 11, 1, attempt=2)) == datas(wanted)


def test_what_is_behind_rows_that_were_taken_back_is_no_longer_known(pair: Pair) -> None:
    _ = pair.forward(pair.leader, 0, 9)
    _ = pair.forward(pair.leader, 9, 3)
    pair.leader.rollback("r1", 1, 10)
    assert pair.spare.adopt("r1", 2, 10) == (9, None)


def test_an_older_copy_still_holds_once_later_rows_were_replaced(pair: Pair) -> None:
    _ = pair.forward(pair.leader, 0, 9)
    _ = pair.forward(pair.leader, 9, 3)
    pair.leader.rollback("r1", 1, 10)
    _ = pair.forward(pair.leader, 10, 1, other=1)
    assert pair.adopt(10) == (9, None)


def test_a_trail_with_a_gap_serves_those_behind_it_only(whole: StageModel) -> None:
    """A block was taken back in part: it cannot be repeated, and what came later can."""
    pair = Pair(StageModel(whole.model, 1, 3))
    _ = pair.forward(pair.leader, 0, 9)
    _ = pair.forward(pair.leader, 9, 3)
    pair.leader.rollback("r1", 1, 10)
    sent = pair.forward(pair.leader, 10, 1, other=1)
    assert pair.adopt(11) == (11, None)
    assert datas(pair.spare.missing("r1", 2, 10, 11)) == datas(sent)
    with pytest.raises(
        PeerLost, match="rows from 9 on are lacking, and the trail begins at row 10"
    ):
        _ = pair.spare.missing("r1", 2, 9, 11)


def test_a_copy_of_a_later_attempt_is_no_earlier_one(last: Pair) -> None:
    _ = last.forward(last.leader, 0, 9, attempt=3)
    assert last.copies.take("r1", 2, 9) is None


def test_the_trail_goes_along(whole: StageModel) -> None:
    """The stage behind the spare may be lost as well, and is sent what the lost one had sent."""
    pair = Pair(StageModel(whole.model, 1, 3))
    sent = pair.forward(pair.leader, 0, 9, reply=pb.REPLY_NONE)
    sent += pair.forward(pair.leader, 9, 1)
    assert pair.spare.adopt("r1", 2, 10) == (10, None)
    assert datas(pair.spare.missing("r1", 2, 0, 10)) == datas(sent)
    assert datas(pair.spare.missing("r1", 2, 9, 10)) == datas(sent[1:])


def test_a_block_that_is_held_in_part_is_sent_on_from_there(whole: StageModel) -> None:
    pair = Pair(StageModel(whole.model, 1, 3))
    _ = pair.forward(pair.leader, 0, 3)
    merged = replace(block(3, 4), schedule=(1, 1, 1, 1), reply=pb.REPLY_NONE)
    pair.clock.now += 1.0
    [sent] = pair.leader.forward(merged)
    assert pair.spare.adopt("r1", 2, 7) == (7, None)
    [rest] = pair.spare.missing("r1", 2, 5, 7)
    assert (rest.position, rest.rows, rest.schedule, rest.tokens) == (5, 2, (1, 1), (5, 6))
    assert rest.data == sent.data[2 * HIDDEN * 4 :]
    with pytest.raises(PeerLost, match="no forward ended at row 2"):
        _ = pair.spare.missing("r1", 2, 2, 7)


def test_the_row_behind_the_prompt_is_sent_once_more(last: Pair) -> None:
    """An attempt was lost before anybody saw its first token; the last stage knows what it said."""
    [said] = last.forward(last.leader, 0, 9, reply=pb.REPLY_LAST)
    _ = last.forward(last.leader, 9, 1)
    for worker in (last.leader, last.spare):
        held, answer = worker.adopt("r1", 2, 9, answer=True)
        assert (held, answer) == (9, replace(said, attempt=2))


def test_a_stage_that_lost_the_row_behind_the_prompt_reads_it_anew(last: Pair) -> None:
    _ = last.forward(last.leader, 0, 9, reply=pb.REPLY_ALL)
    assert last.leader.adopt("r1", 2, 9, answer=True) == (0, None)


# ---------------------------------------------------------------------------------------- pace


def test_a_request_is_copied_now_and_then(last: Pair) -> None:
    last.tick = 0.0
    _ = last.forward(last.leader, 0, 9)
    last.clock.now += EVERY_S / 2
    _ = last.forward(last.leader, 9, 1)
    assert [copy.position for copy in last.sent] == [9]
    _ = last.forward(last.leader, 0, 3, request="r2")
    assert [copy.request for copy in last.sent] == ["r1", "r2"], "each request has its own turn"
    last.clock.now += EVERY_S
    _ = last.forward(last.leader, 10, 1)
    assert [copy.position for copy in last.sent] == [9, 3, 11]


def test_copies_take_a_fiftieth_of_the_time_at_most(last: Pair) -> None:
    last.tick, last.clock.step = 0.0, 0.1
    _ = last.forward(last.leader, 0, 9)
    last.clock.step = 0.0
    last.clock.now += 0.1 / copier_module.COMPUTE_SHARE - 0.5
    _ = last.forward(last.leader, 9, 1)
    assert len(last.sent) == 1
    last.clock.now += 0.6
    _ = last.forward(last.leader, 10, 1)
    assert len(last.sent) == 2


def test_no_copy_is_made_while_one_is_on_its_way_and_slow_ways_have_rest(last: Pair) -> None:
    last.arrives = False
    _ = last.forward(last.leader, 0, 9)
    last.clock.now += 100
    _ = last.forward(last.leader, 9, 1)
    assert len(last.sent) == 1
    last.state_sender.delivered(20.0)
    last.clock.now += 50
    _ = last.forward(last.leader, 10, 1)
    assert len(last.sent) == 1, "it was on its way for 20 s, which leaves 60 s without"
    last.clock.now += 20
    _ = last.forward(last.leader, 11, 1)
    assert [(copy.begin, copy.position) for copy in last.sent] == [(0, 9), (9, 12)]


@pytest.mark.parametrize("why", ["refused", "another spare"])
def test_a_spare_that_has_nothing_is_sent_everything(last: Pair, why: str) -> None:
    _ = last.forward(last.leader, 0, 9)
    if why == "refused":
        last.state_sender.refused("r1")
    else:
        last.state_sender.follow(following=True)
    last.clock.now += 1000
    _ = last.forward(last.leader, 9, 1)
    assert [(copy.begin, copy.position) for copy in last.sent] == [(0, 9), (0, 10)]
    assert last.spare.adopt("r1", 2, 10) == (10, None)


def test_without_a_spare_nothing_is_copied(last: Pair) -> None:
    last.state_sender.follow(following=False)
    _ = last.forward(last.leader, 0, 9)
    assert last.sent == []


def test_a_request_that_is_too_large_at_once_is_not_copied_and_says_so(
    last: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copier_module, "MAX_COPY", 100)
    with caplog.at_level("INFO"):
        _ = last.forward(last.leader, 0, 9)
        _ = last.forward(last.leader, 9, 1)
    assert last.sent == []
    assert [record.getMessage() for record in caplog.records] == [
        "request r1 is not copied to the spare: 0 MB are too many at once"
    ]


# --------------------------------------------------------------------------------- what is kept


def test_a_request_that_ended_is_dropped_at_once(last: Pair) -> None:
    _ = last.forward(last.leader, 0, 9)
    _ = last.forward(last.leader, 0, 9, request="r2")
    held = last.spare.cache_bytes()
    last.leader.release("r1", 1)
    assert last.holds == [("r2",)]
    assert 0 < last.spare.cache_bytes() < held
    last.leader.release("r2", 1)
    assert last.spare.cache_bytes() == 0


def test_copies_that_nobody_holds_are_dropped_after_their_lease(last: Pair) -> None:
    _ = last.forward(last.leader, 0, 9)
    last.clock.now += 9
    last.copies.hold(["r1"])
    last.clock.now += 9
    assert last.spare.expire(10.0) == []
    last.clock.now += 2
    assert last.spare.expire(10.0) == ["r1"]
    assert last.spare.cache_bytes() == 0
    assert last.spare.adopt("r1", 2, 9) == (0, None)


def test_what_an_earlier_attempt_still_sends_is_refused(last: Pair) -> None:
    """Its runner was stopped, and goes on while the spare is in its place."""
    _ = last.forward(last.leader, 0, 9)
    assert last.spare.adopt("r1", 2, 9) == (9, None)
    assert refused(lambda: last.forward(last.leader, 9, 1)) == "copy.attempt"
    assert last.copies.bytes == 0


Spoil = Callable[[pb.StateCopy], object]
SPOILT: list[tuple[str, Spoil]] = [
    ("placement", lambda copy: setattr(copy, "placement", "p2")),
    ("request", lambda copy: setattr(copy, "request", "../r1")),
    ("attempt", lambda copy: setattr(copy, "attempt", 0)),
    ("begin", lambda copy: setattr(copy, "begin", 10)),
    ("position", lambda copy: setattr(copy, "position", 513)),
    ("position", lambda copy: setattr(copy, "position", copy.begin)),
    ("replay_begins", lambda copy: setattr(copy, "replay_begins", 2**40)),
    ("layers", lambda copy: copy.layers.pop()),
    ("layers", lambda copy: copy.layers[0].tensors.pop()),
    ("layers", lambda copy: copy.layers[-1].tensors[0].shape.append(2)),
    ("layers", lambda copy: setattr(copy.layers[-1].tensors[0], "data", b"1234")),
    ("layers", lambda copy: setattr(copy.layers[-1].tensors[0], "dtype", 9)),
    ("layers", lambda copy: setattr(copy.layers[-1], "room", 2**30)),
    ("layers", lambda copy: setattr(copy.layers[-1], "room", 1)),
]


@pytest.mark.parametrize(("param", "spoil"), SPOILT)
def test_a_copy_that_cannot_be_is_refused_and_nothing_is_made_of_it(
    last: Pair, param: str, spoil: Spoil
) -> None:
    _ = last.forward(last.leader, 0, 9)
    last.arrives = False
    _ = last.forward(last.leader, 9, 1)
    copy = last.sent[-1]
    spoil(copy)
    assert refused(lambda: last.copies.keep(copy)) == f"copy.{param}"
    # What was kept before is dropped with it, but for that of another request's name.
    assert last.spare.adopt("r1", 2, 10) == (9 if param == "request" else 0, None)
    assert last.forward(last.spare, 0, 2, request="r2"), "the spare can be used all the same"


def test_rows_of_another_width_cannot_be_joined(whole: StageModel, last: Pair) -> None:
    _ = last.forward(last.leader, 0, 9)
    last.arrives = False
    _ = last.forward(last.leader, 9, 1)
    keys = last.sent[-1].layers[-1].tensors[0]
    keys.shape[3] *= 2
    keys.data *= 2
    assert refused(lambda: last.copies.keep(last.sent[-1])) == "copy.layers"


def test_kinds_of_caches_that_hold_more_are_named() -> None:
    assert why_not_copied([RotatingKVCache(8)]) == "caches of kind RotatingKVCache cannot be copied"


def test_attention_and_recurrent_states_can_be_copied(last: Pair) -> None:
    assert last.copies.why_not == ""
