"""Rounds that copy, on a later stage: the rows that did not stay leave no trace, and what does not
fit is refused by its name."""

# pyright: reportPrivateUsage=false

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from clocks import Clock
from models import Family, make_checkpoint

from exo_node.placement.errors import ExoNodeError, InvalidFrame, NumericError, PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.stage import StageOutput, StageWorker
from exo_node.shard.model.open_model import open_model, read_layers
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import KvQuantisation, StageModel
from exo_node.shard.model.tensors import to_bytes
from exo_node.shard.pipeline.copy_query import ExactCopies
from exo_node.shard.pipeline.frames import BlockMember, HiddenBlock, Replayed

HIDDEN, LAYERS, FIRST = 64, 4, 2
ROW = HIDDEN * 4
LIMITS = StageLimits(
    placement="p1",
    stage=1,
    dtype="float32",
    hidden_size=HIDDEN,
    max_rows=32,
    context_length=512,
    vocabulary=512,
)
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, tuple[Family, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "gated delta": ("qwen3_5", {}),
    "latent": ("deepseek_v3", {"first_k_dense_replace": 99}),
    "windows": ("llama", WINDOWS),
    "quantised": ("llama", {"head_dim": 32}),
}
COPIES = ExactCopies((3, 7), (0.1, 0.2, 0.3), (0.0, 0.0))
PROMPT = 21


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    """The last two layers of a model whose caches are of that kind, or of two kinds."""
    family, changes = KINDS[request.param]
    folder: Path = tmp_path_factory.mktemp("copies") / "model"
    fields: dict[str, Any] = {"dtype": "float32", "layers": LAYERS, "mtp": False}
    _ = make_checkpoint(folder, family, changes=changes, **fields)
    whole = open_model(folder)
    _ = read_layers(whole, FIRST, LAYERS, mx.float32, outer=False, progress=lambda _a, _b: None)
    kv = KvQuantisation(8, 32) if request.param == "quantised" else None
    return StageModel(whole, FIRST, LAYERS, kv)


@dataclass(slots=True)
class Stage:
    """A later stage with one request or several, whose rows depend on where they stand."""

    model: StageModel
    clock: Clock = field(default_factory=Clock)
    worker: StageWorker = field(init=False)

    def __post_init__(self) -> None:
        self.worker = StageWorker(self.model, LIMITS, self.clock)
        self.worker.copies.exact = COPIES

    def begin(self, *names: str, agreed: bool = True) -> "Stage":
        for name in names:
            chunk = replace(block(0, PROMPT, name), reply=pb.REPLY_COMPUTED)
            _ = data_of(self.worker.forward(chunk))
            if agreed:
                assert self.worker.agree_on_copies((name, 1), COPIES) == added(COPIES)
        return self

    def round(
        self, position: int, rows: int = 1, kept: int | None = None, name: str = "a"
    ) -> bytes:
        return data_of(self.worker.forward(block(position, rows, name, kept)))

    def refused(self, position: int, rows: int = 1, kept: int | None = None) -> str | None:
        """The field that is named."""
        output = self.worker.forward(block(position, rows, "a", kept))
        ((_, fault),) = output.faults
        assert isinstance(fault, InvalidFrame) and output.block is None
        return fault.param


def added(copies: ExactCopies) -> ExactCopies:
    """With the seconds of a second stage that takes as long."""
    verify, removal = ([2 * s for s in each] for each in (copies.verify_s, copies.removal_s))
    return ExactCopies(list(copies.lengths), verify, removal)


def rows_of(name: str, position: int, rows: int, stays: int) -> bytes:
    """Rows that depend on the request and on where they stand; those after `stays` are others."""
    seeds = [1000 * sum(name.encode()) + position + n + 500 * (n >= stays) for n in range(rows)]
    noise = [mx.random.normal((1, 1, HIDDEN), key=mx.random.key(seed)) for seed in seeds]
    return to_bytes(mx.concatenate(noise, axis=1))


def block(
    position: int, rows: int, name: str = "a", kept: int | None = None, stays: int = 99
) -> HiddenBlock:
    """`stays`: rows of it that later stand in the place where plain decoding has the same ones."""
    return HiddenBlock(
        members=(BlockMember(name, 1, position, kept_rows=kept),),
        rows=rows,
        tokens=tuple(range(position, position + rows)),
        reply=pb.REPLY_ALL,
        data=rows_of(name, position, rows, stays),
    )


def data_of(output: StageOutput) -> bytes:
    assert not output.faults and output.block is not None
    return output.block.data


def plain(model: StageModel, count: int, name: str = "a") -> list[bytes]:
    """The rows of rounds of one row each after the prompt."""
    stage = Stage(model).begin(name)
    return [stage.round(PROMPT + at, name=name) for at in range(count)]


@pytest.mark.parametrize("rows", [4, 8])
def test_rows_that_did_not_stay_leave_no_trace(model: StageModel, rows: int) -> None:
    """Whatever number of them stays, none too; then a plain round and another that copies."""
    expected = plain(model, 2 * rows + 2)
    for kept in range(rows + 1):
        stage = Stage(model).begin("a")
        copied = data_of(stage.worker.forward(block(PROMPT, rows, stays=kept)))
        assert copied[: kept * ROW] == b"".join(expected[:kept])
        after = stage.round(PROMPT + kept, kept=kept)
        assert after == expected[kept]
        again = stage.round(PROMPT + kept + 1, rows)
        assert again == b"".join(expected[kept + 1 : kept + 1 + rows])
        assert stage.round(PROMPT + kept + 1 + rows, kept=rows) == expected[kept + 1 + rows]


def test_rows_are_taken_back_before_others_share_a_forward(model: StageModel) -> None:
    expected = {name: plain(model, 6, name) for name in ("a", "b")}
    stage = Stage(model).begin("a", "b")
    _ = data_of(stage.worker.forward(block(PROMPT, 8, stays=3)))
    for at, kept in ((0, 3), (1, None)):
        members = BlockMember("b", 1, PROMPT + at), BlockMember("a", 1, PROMPT + 3 + at, 0, kept)
        shared = HiddenBlock(
            members,
            1,
            tuple(member.position for member in members),
            pb.REPLY_ALL,
            b"".join(rows_of(m.request, m.position, 1, 99) for m in members),
        )
        data = data_of(stage.worker.forward(shared))
        assert data == expected["b"][at] + expected["a"][3 + at]
    assert stage.round(PROMPT + 5, 1) == expected["a"][5]


def test_an_end_or_a_lease_between_two_rounds_frees_all(model: StageModel) -> None:
    stage = Stage(model).begin("a", "b")
    _ = data_of(stage.worker.forward(block(PROMPT, 8)))
    stage.worker.release(("a", 1))
    assert stage.worker.live_requests == 1
    _ = data_of(stage.worker.forward(block(PROMPT, 8, "b")))
    stage.clock.now += 11
    assert stage.worker.expire(10) == ["b"]
    assert (stage.worker.live_requests, stage.worker.cache_bytes()) == (0, 0)


@pytest.mark.smoke
@pytest.mark.parametrize("kept", [None, 9, 2**32 - 1])
def test_how_many_rows_stay_has_to_be_said_and_to_be_possible(
    model: StageModel, kept: int | None
) -> None:
    stage = Stage(model).begin("a")
    expected = plain(model, 3)
    _ = data_of(stage.worker.forward(block(PROMPT, 8, stays=2)))
    assert stage.refused(PROMPT + 2, kept=kept) == "hidden.members.kept_rows"
    assert stage.round(PROMPT + 2, kept=2) == expected[2], "the refused block took rows back"


@pytest.mark.parametrize("kept", [0, 1, 8])
def test_nothing_is_taken_back_of_what_was_no_round_that_copied(
    model: StageModel, kept: int
) -> None:
    stage = Stage(model).begin("a")
    assert stage.refused(PROMPT, kept=kept) == "hidden.members.kept_rows"
    _ = stage.round(PROMPT)
    assert stage.refused(PROMPT + 1, kept=kept) == "hidden.members.kept_rows"
    _ = stage.round(PROMPT + 1, 4)
    _ = stage.round(PROMPT + 4, kept=3)
    assert stage.refused(PROMPT + 5, kept=kept) == "hidden.members.kept_rows", "twice"


def test_a_position_that_does_not_fit_what_stays_takes_nothing_back(model: StageModel) -> None:
    stage = Stage(model).begin("a")
    expected = plain(model, 3)
    _ = data_of(stage.worker.forward(block(PROMPT, 8, stays=2)))
    assert stage.refused(PROMPT + 3, kept=2) == "hidden.members.position"
    assert stage.refused(PROMPT, kept=2) == "hidden.members.position"
    assert stage.round(PROMPT + 2, kept=2) == expected[2]


@pytest.mark.parametrize("rows", [2, 5, 16, 32])
def test_a_round_has_no_length_that_the_stages_did_not_agree_on(
    model: StageModel, rows: int
) -> None:
    stage = Stage(model).begin("a")
    assert stage.refused(PROMPT, rows) == "hidden.rows"
    assert len(stage.round(PROMPT, 8)) == 8 * ROW


def test_a_query_of_an_old_attempt_or_without_a_state_is_refused(model: StageModel) -> None:
    stage = Stage(model).begin("a")
    with pytest.raises(PeerLost):
        _ = stage.worker.agree_on_copies(("never", 1), COPIES)
    stage.worker.release(("a", 1))
    with pytest.raises(ExoNodeError) as caught:
        _ = stage.worker.agree_on_copies(("a", 1), COPIES)
    assert caught.value.param == "attempt"


def test_a_repeated_log_is_followed_by_a_round_that_copies(model: StageModel) -> None:
    expected, stage = plain(model, 12), Stage(model).begin("a")
    log = replace(block(PROMPT, 8, stays=3), reply=pb.REPLY_COMPUTED, replayed=(Replayed(8, 3),))
    _ = data_of(stage.worker.forward(log))
    assert stage.round(PROMPT + 3, 8) == b"".join(expected[3:11])
    assert stage.round(PROMPT + 11, kept=8) == expected[11]


def test_numbers_that_are_not_finite_are_for_the_first_stage_to_see(model: StageModel) -> None:
    """They may be a rejected draft's. In a plain round they end the answer here."""
    stage, bad = Stage(model).begin("a"), b"\xff" * ROW
    wide = block(PROMPT, 4)
    output = stage.worker.forward(replace(wide, data=wide.data[: 3 * ROW] + bad))
    assert len(data_of(output)) == 4 * ROW
    assert stage.round(PROMPT, kept=0) == plain(model, 1)[0]
    output = stage.worker.forward(replace(block(PROMPT + 1, 1), data=bad))
    ((_, fault),) = output.faults
    assert isinstance(fault, NumericError)


def test_the_prefix_cache_makes_room_as_often_as_rows_need_it(model: StageModel) -> None:
    """At every 64th row, whether a round begins with it or has it among others."""
    calls, stage = list[int](), Stage(model).begin("a")
    stage.worker._shrink_prefixes = lambda: calls.append(position)  # type: ignore[method-assign]
    position, kept = PROMPT, None
    while position < 200:
        _ = stage.round(position, 8, kept)
        position, kept = position + 8, 8
    assert [at // 64 for at in calls] == [0, 1, 2] and all(-at % 64 < 8 for at in calls)
