"""Tensor frames: every field is checked; cutting a block and joining it again is lossless."""

import ast
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.placement.errors import InvalidFrame
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.tensors import ITEM_BYTES
from exo_node.shard.pipeline import frames
from exo_node.shard.pipeline.frames import (
    MAX_DATA,
    MAX_TOGETHER,
    Assembler,
    BlockMember,
    HiddenBlock,
    Replayed,
    check_envelope,
    cut,
    members_of,
)

HIDDEN = 8
EXPECTED = StageLimits(
    placement="p1",
    stage=1,
    dtype="float16",
    hidden_size=HIDDEN,
    max_rows=4,
    context_length=100,
    vocabulary=50,
)
WIDE = replace(EXPECTED, dtype="float32", hidden_size=65_536, max_rows=16)
"""Rows of 256 KiB: four fill a frame."""


def a_block(
    request: str = "r1", rows: int = 3, expected: StageLimits = EXPECTED, attempt: int = 2
) -> HiddenBlock:
    return HiddenBlock(
        members=(BlockMember(request, attempt, 7),),
        rows=rows,
        tokens=tuple(range(rows)),
        reply=pb.REPLY_ALL,
        data=some_data(rows, expected, len(request)),
    )


def a_round(count: int = 3, expected: StageLimits = EXPECTED) -> HiddenBlock:
    """A row of each of several requests."""
    return HiddenBlock(
        members=tuple(BlockMember(f"r{i}", i + 1, 7 * i) for i in range(count)),
        rows=1,
        tokens=tuple(range(count)),
        reply=pb.REPLY_ALL,
        data=some_data(count, expected, 3),
    )


def a_replay(*replayed: tuple[int, int]) -> HiddenBlock:
    """Three rows that stand for these forwards of (rows, kept) each."""
    forwards = tuple(Replayed(*forward) for forward in replayed)
    return replace(a_block(), reply=pb.REPLY_COMPUTED, replayed=forwards)


def some_data(rows: int, expected: StageLimits, seed: int) -> bytes:
    size = rows * expected.hidden_size * ITEM_BYTES[expected.dtype]
    unit = bytes((i * 31 + seed) % 251 for i in range(251))
    return unit * (size // 251) + bytes(size % 251)


def frames_of(block: HiddenBlock, expected: StageLimits = EXPECTED) -> list[pb.Frame]:
    return list(
        cut(block, expected.placement, expected.stage, expected.dtype, expected.hidden_size)
    )


def a_frame() -> pb.Frame:
    return frame_of(a_block())


def frame_of(block: HiddenBlock) -> pb.Frame:
    [frame] = frames_of(block)
    return frame


def refused(frame: pb.Frame, assembler: Assembler | None = None) -> str | None:
    """The field that is named."""
    with pytest.raises(InvalidFrame) as caught:
        _ = (assembler or Assembler(EXPECTED)).add(frame)
    return caught.value.param


def setting(field: str, value: object) -> Callable[[pb.Frame], None]:
    """Sets one field of a frame, or of its hidden states."""

    def change(frame: pb.Frame) -> None:
        at, name = (frame.hidden, field[7:]) if field.startswith("hidden.") else (frame, field)
        if isinstance(value, list):
            at.ClearField(name)  # type: ignore[arg-type]
            getattr(at, name).extend(value)
        else:
            setattr(at, name, value)

    return change


SIZE = 3 * HIDDEN * 2
MUTATIONS: list[tuple[str, object]] = [
    ("placement", ""),
    ("placement", "p2"),
    ("request", ""),
    ("request", "r" * 65),
    ("request", "r 1"),
    ("request", "../r1"),
    ("request", "r1\n"),
    ("request", "ré"),
    ("attempt", 0),
    ("hidden.stage", 0),
    ("hidden.stage", 2),
    ("hidden.rows", 0),
    ("hidden.rows", 5),
    ("hidden.rows", 2**32 - 1),
    ("hidden.dtype", 0),
    ("hidden.dtype", pb.DTYPE_FLOAT32),
    ("hidden.dtype", pb.DTYPE_BFLOAT16),
    ("hidden.dtype", 99),
    ("hidden.shape", []),
    ("hidden.shape", [3, HIDDEN]),
    ("hidden.shape", [1, 3, HIDDEN, 1]),
    ("hidden.shape", [1, 2, HIDDEN]),
    ("hidden.shape", [1, 3, HIDDEN + 1]),
    ("hidden.shape", [3, 1, HIDDEN]),
    ("hidden.shape", [2**32 - 1] * 6),
    ("hidden.offset", 1),
    ("hidden.offset", 2**64 - 1),
    ("hidden.data", b""),
    ("hidden.data", bytes(SIZE + 1)),
    ("hidden.data", bytes(MAX_DATA + 1)),
    ("hidden.tokens", []),
    ("hidden.tokens", [1, 2]),
    ("hidden.tokens", [1, 2, 3, 4]),
    ("hidden.tokens", [1, 2, 50]),
    ("hidden.tokens", [1, 2, 2**31 - 1]),
    ("hidden.places", [0] * 9),  # of rows after a prompt
    ("hidden.reply", 0),
    ("hidden.reply", 3),
    ("hidden.reply", 5),
    ("hidden.members", []),
    ("hidden.border", pb.BORDER_KEPT),
]
# Frames after the first carry no tokens, so an offset that is off shows there first.
NAMED_INSTEAD = {"hidden.offset": "hidden.tokens"}


@pytest.mark.parametrize(
    ("field", "value"), MUTATIONS, ids=[f"{f}={str(v)[:24]!r}" for f, v in MUTATIONS]
)
def test_a_frame_with_one_wrong_field_is_refused_by_its_name(field: str, value: object) -> None:
    frame = a_frame()
    setting(field, value)(frame)
    assembler = Assembler(EXPECTED)
    assert refused(frame, assembler) == NAMED_INSTEAD.get(field, field)
    assert assembler.add(a_frame()) == a_block(), "the refused frame left something behind"


@pytest.mark.parametrize(
    ("places", "fits"), [(9, True), (8, False), (10, False), (3, False), (0, True)]
)
def test_rows_of_images_have_three_positions_each(places: int, fits: bool) -> None:
    chunk = replace(a_block(), reply=pb.REPLY_LAST, places=(5,) * places)
    if fits:
        assert Assembler(EXPECTED).add(frame_of(chunk)) == chunk
    else:
        assert refused(frame_of(chunk)) == "hidden.places"
    context = EXPECTED.context_length
    beyond = replace(chunk, places=(0,) * 8 + (context,))
    assert refused(frame_of(beyond)) == "hidden.places"
    repeated = replace(a_replay((1, 1), (2, 2)), places=(5,) * 9)
    assert refused(frame_of(repeated)) == "hidden.places"


@pytest.mark.parametrize("delta", [1, -8, -(2**31)])
def test_images_take_no_more_positions_than_rows(delta: int) -> None:
    block = replace(a_block(), members=(BlockMember("r1", 2, 7, delta),))
    assert refused(frame_of(block)) == "hidden.members.delta"


@pytest.mark.parametrize("kept_rows", [5, 8, 2**32 - 1])
def test_no_more_rows_stay_than_a_round_has_and_there_are(kept_rows: int) -> None:
    block = replace(a_block(), members=(BlockMember("r1", 2, 7, kept_rows=kept_rows),))
    assert refused(frame_of(block)) == "hidden.members.kept_rows"
    early = replace(a_block(), members=(BlockMember("r1", 2, 3, kept_rows=4),))
    assert refused(frame_of(early)) == "hidden.members.kept_rows"


@pytest.mark.parametrize("reply", [pb.REPLY_LAST, pb.REPLY_COMPUTED])
def test_only_a_round_says_how_many_rows_of_the_last_one_stay(
    reply: "pb.Reply.ValueType",
) -> None:
    members = (BlockMember("r1", 2, 7, kept_rows=0),)
    assert Assembler(EXPECTED).add(frame_of(replace(a_block(), members=members))) is not None
    chunk = replace(a_block(), members=members, reply=reply)
    assert refused(frame_of(chunk)) == "hidden.members.kept_rows"


GOOD_COPIES: dict[str, Any] = {
    "lengths": [3, 7],
    "verify_s": [0.1, 0.2, 0.3],
    "removal_s": [0, 0.1],
    "reason": "",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lengths", [7, 3]),
        ("lengths", [3, 3]),
        ("lengths", [0, 3]),
        ("lengths", [3, 64]),
        ("lengths", list(range(1, 10))),
        ("verify_s", [0.1, 0.2]),
        ("verify_s", []),
        ("verify_s", [0.1, float("nan"), 0.3]),
        ("verify_s", [0.1, -0.2, 0.3]),
        ("removal_s", [0.1]),
        ("removal_s", [0, float("inf")]),
        ("reason", "x" * 301),
    ],
)
def test_a_query_for_copies_with_one_wrong_field_is_refused_by_its_name(
    field: str, value: object
) -> None:
    def envelope(**fields: Any) -> pb.Frame:
        copies = pb.CopyQuery(**(GOOD_COPIES | fields))
        return pb.Frame(placement="p1", request="r1", attempt=1, copies=copies)

    check_envelope(envelope(), EXPECTED)
    with pytest.raises(InvalidFrame) as caught:
        check_envelope(envelope(**{field: value}), EXPECTED)
    assert caught.value.param == f"copies.{field}"


def test_a_frame_of_no_kind_is_refused() -> None:
    assert refused(pb.Frame(placement="p1", request="r1", attempt=1)) == "kind"


# -------------------------------------------------------------------------------- members


def of_member(index: int, **fields: object) -> Callable[[pb.Frame], None]:
    """Sets fields of one of a frame's members."""

    def change(frame: pb.Frame) -> None:
        for name, value in fields.items():
            setattr(frame.hidden.members[index], name, value)

    return change


def with_members(*chosen: int) -> Callable[[pb.Frame], None]:
    """Replaces the members by some of them, by place; the rows stay."""

    def change(frame: pb.Frame) -> None:
        before = [pb.Member.FromString(m.SerializeToString()) for m in frame.hidden.members]
        setting("hidden.members", [before[index] for index in chosen])(frame)
        setting("hidden.shape", [len(chosen), 1, HIDDEN])(frame)
        setting("hidden.tokens", [1] * len(chosen))(frame)
        setting("hidden.data", bytes(len(chosen) * HIDDEN * 2))(frame)

    return change


def two_rows_each(frame: pb.Frame) -> None:
    frame.hidden.rows = 2
    setting("hidden.shape", [3, 2, HIDDEN])(frame)
    setting("hidden.tokens", [1] * 6)(frame)
    setting("hidden.data", bytes(6 * HIDDEN * 2))(frame)


OF_MEMBERS: list[tuple[str, str, Callable[[pb.Frame], None]]] = [
    ("hidden.members", "none", with_members()),
    ("hidden.members", "the same one twice", with_members(0, 1, 1)),
    ("hidden.members", "two attempts of one request", of_member(2, request="r1")),
    ("hidden.members", "in another order than the frame's", with_members(1, 0, 2)),
    ("hidden.members", "the frame's first left out", with_members(1, 2)),
    ("hidden.members", "the first of another attempt", of_member(0, attempt=9)),
    ("hidden.members", "the frame of another request", setting("request", "r9")),
    ("hidden.members", "the frame of another attempt", setting("attempt", 9)),
    ("hidden.members", "two rows each", two_rows_each),
    ("hidden.members", "the end of prompts", setting("hidden.reply", pb.REPLY_LAST)),
    ("hidden.members", "chunks of prompts", setting("hidden.reply", pb.REPLY_COMPUTED)),
    ("hidden.members.position", "beyond the context", of_member(1, position=100)),
    ("hidden.members.position", "of the first", of_member(0, position=2**64 - 1)),
    ("hidden.members.request", "no name", of_member(1, request="")),
    ("hidden.members.request", "a long name", of_member(2, request="r" * 65)),
    ("hidden.members.request", "a path", of_member(1, request="../r1")),
    ("hidden.members.attempt", "no attempt", of_member(2, attempt=0)),
    ("hidden.shape", "for one", setting("hidden.shape", [1, 1, HIDDEN])),
    ("hidden.shape", "as rows of one", setting("hidden.shape", [1, 3, HIDDEN])),
    ("hidden.tokens", "of one", setting("hidden.tokens", [1])),
    ("hidden.data", "for four", setting("hidden.data", bytes(4 * HIDDEN * 2))),
    ("hidden.border", "kept", setting("hidden.border", pb.BORDER_KEPT)),
]


@pytest.mark.parametrize(
    ("field", "change"),
    [(field, change) for field, _, change in OF_MEMBERS],
    ids=[f"{field}: {what}" for field, what, _ in OF_MEMBERS],
)
def test_a_round_with_one_wrong_field_is_refused_by_its_name(
    field: str, change: Callable[[pb.Frame], None]
) -> None:
    frame = frame_of(a_round())
    change(frame)
    assembler = Assembler(EXPECTED)
    assert refused(frame, assembler) == field
    assert assembler.add(frame_of(a_round())) == a_round(), "something was left behind"


def test_as_many_requests_as_run_at_once_share_a_block_and_no_more() -> None:
    most = a_round(MAX_TOGETHER)
    limits = replace(EXPECTED, context_length=1000)
    assert Assembler(limits).add(frame_of(most)) == most
    assert refused(frame_of(a_round(MAX_TOGETHER + 1)), Assembler(limits)) == "hidden.members"


def test_a_frame_is_about_all_its_members_or_else_about_its_request() -> None:
    assert members_of(frame_of(a_round())) == [("r0", 1), ("r1", 2), ("r2", 3)]
    release = pb.Frame(placement="p1", request="r9", attempt=4, release=pb.Release())
    assert members_of(release) == [("r9", 4)]
    bare = a_frame()
    setting("hidden.members", [])(bare)
    assert members_of(bare) == [("r1", 2)], "a refusal of it would reach nobody"


# ------------------------------------------------------------------------------- replayed


@pytest.mark.parametrize(
    "replayed",
    [
        [(3, 3), (1, 1)],
        [(1, 1), (1, 1)],
        [(4, 4)],
        [(2, 0), (1, 1)],
        [(2, 3), (1, 1)],
        [(0, 0), (3, 3)],
        [(0, 1), (3, 3)],
        [(2**32 - 1, 1)],
    ],
    ids=str,
)
def test_forwards_that_are_not_the_blocks_are_refused(replayed: list[tuple[int, int]]) -> None:
    """Their rows do not add up to its own, one keeps no row, or more than it has."""
    assert refused(frame_of(a_replay(*replayed))) == "hidden.replayed"


@pytest.mark.parametrize("reply", [pb.REPLY_ALL, pb.REPLY_LAST])
def test_no_rows_come_back_of_what_is_repeated(reply: "pb.Reply.ValueType") -> None:
    assert refused(frame_of(replace(a_replay((1, 1), (2, 2)), reply=reply))) == "hidden.replayed"


def test_a_block_keeps_all_rows_but_those_that_a_repeated_forward_drops() -> None:
    assert a_block(rows=3).kept_rows == 3
    assert a_round(3).kept_rows == 1, "of each request"
    assert a_replay((1, 1), (2, 1)).kept_rows == 2


def test_word_that_a_chunk_was_computed_travels_without_its_rows() -> None:
    confirmation = replace(a_replay((3, 2)), tokens=(), data=b"", replayed=())
    [frame] = frames_of(confirmation)
    check_envelope(frame, EXPECTED)
    assert (frame.request, frame.attempt, frame.WhichOneof("kind")) == ("r1", 2, "computed")
    assert frame.computed.position == 7


# ------------------------------------------------------------------------------- prefixes


def a_question() -> pb.Frame:
    query = pb.PrefixQuery(tokens=range(44, 50), schedule=[4, 2], held=[4, 6])
    return pb.Frame(placement="p1", request="r1", attempt=1, prefix=query)


def test_a_prefix_of_the_placements_forwards_is_accepted() -> None:
    check_envelope(a_question(), EXPECTED)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", []),
        ("tokens", [1] * 101),
        ("tokens", [1, 2, 3, 4, 5, 50]),
        ("schedule", []),
        ("schedule", [4, 1]),
        ("schedule", [5, 1]),
        ("schedule", [4, 2, 0]),
        ("held", [4, 5]),
        ("held", [0]),
    ],
)
def test_a_prefix_that_is_none_is_refused(field: str, value: Sequence[int]) -> None:
    frame = a_question()
    frame.prefix.ClearField(field)  # pyright: ignore[reportArgumentType]
    getattr(frame.prefix, field).extend(value)
    with pytest.raises(InvalidFrame) as caught:
        check_envelope(frame, EXPECTED)
    assert caught.value.param == f"prefix.{field}"


def test_a_border_travels_with_a_forward_over_a_prompt_alone() -> None:
    block = replace(a_block(), reply=pb.REPLY_COMPUTED, border=pb.BORDER_FIRST_TURN)
    assert Assembler(EXPECTED).add(frame_of(block)) == block
    for changed in (
        replace(block, reply=pb.REPLY_ALL),
        replace(block, reply=pb.REPLY_LAST),
        replace(block, replayed=(Replayed(1, 1), Replayed(2, 2))),
        replace(block, border=cast("Any", 3)),
    ):
        assert refused(frame_of(changed)) == "hidden.border"


# ------------------------------------------------------------- blocks of several frames


def test_the_last_rows_of_the_context_and_the_last_id_are_accepted() -> None:
    frame = a_frame()
    frame.hidden.members[0].position = 97
    setting("hidden.tokens", [49, 49, 49])(frame)
    assert Assembler(EXPECTED).add(frame) is not None
    frame.hidden.members[0].position = 98
    assert refused(frame) == "hidden.members.position"


def test_data_that_is_too_short_never_becomes_a_block() -> None:
    frame = a_frame()
    frame.hidden.data = frame.hidden.data[:-1]
    assembler = Assembler(EXPECTED)
    assert assembler.add(frame) is None
    assert assembler.add(a_frame()) == a_block(), "the next block is another one"


def test_nothing_is_allocated_for_a_refused_frame() -> None:
    frame = a_frame()
    frame.hidden.rows = 2**32 - 1
    setting("hidden.shape", [1, 2**32 - 1, HIDDEN])(frame)
    assembler = Assembler(replace(EXPECTED, max_rows=256))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidFrame, match=r"hidden\.rows must be 1 to 256"):
            _ = assembler.add(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_block_over_one_mebibyte_is_cut_and_put_together_in_order() -> None:
    block = a_block(rows=11, expected=WIDE)
    frames = frames_of(block, WIDE)
    assert [f.hidden.offset for f in frames] == [0, MAX_DATA, 2 * MAX_DATA]
    assert [len(f.hidden.data) for f in frames] == [MAX_DATA, MAX_DATA, 3 * MAX_DATA // 4]
    assert [len(f.hidden.tokens) for f in frames] == [11, 0, 0]
    # With its names around it, a frame must fit gRPC's default limit.
    assert all(frame.ByteSize() < MAX_DATA + 1024 for frame in frames)
    assembler = Assembler(WIDE)
    assert [assembler.add(frame) for frame in frames] == [None, None, block]


def test_a_block_that_begins_ends_one_that_was_left_open() -> None:
    """A block's frames follow each other: nothing more of the first one can be good."""
    one, other = (a_block(name, rows=11, expected=WIDE) for name in ("r1", "r2"))
    (first, second, _), frames = frames_of(one, WIDE), frames_of(other, WIDE)
    assembler = Assembler(WIDE)
    assert assembler.add(first) is None
    assert [assembler.add(frame) for frame in frames] == [None, None, other]
    assert refused(second, assembler) == "hidden.offset"
    assert [assembler.add(frame) for frame in frames] == [None, None, other]


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 0, 2), (0, 1, 1), (0, 1, 2, 2)], ids=str)
def test_frames_out_of_order_are_refused(order: tuple[int, ...]) -> None:
    block = a_block(rows=11, expected=WIDE)
    frames = frames_of(block, WIDE)
    assembler = Assembler(WIDE)
    for index in order[:-1]:
        assert assembler.add(frames[index]) == (block if index == 2 else None)
    assert refused(frames[order[-1]], assembler) == "hidden.offset"
    assert [assembler.add(frame) for frame in frames] == [None, None, block]


def another_attempt(frame: pb.Frame) -> None:
    frame.attempt = frame.hidden.members[0].attempt = 3


def more_rows(frame: pb.Frame) -> None:
    frame.hidden.rows = frame.hidden.shape[1] = 12


def one_more_member(frame: pb.Frame) -> None:
    frame.hidden.members.append(pb.Member(request="r99", attempt=1))
    frame.hidden.shape[0] += 1


BETWEEN = {
    "attempt": another_attempt,
    "position": of_member(0, position=8),
    "reply": setting("hidden.reply", pb.REPLY_LAST),
    "rows": more_rows,
}


@pytest.mark.parametrize(
    ("block", "change"),
    [
        *((a_block(rows=11, expected=WIDE), change) for change in BETWEEN.values()),
        *((a_round(12, WIDE), change) for change in (one_more_member, of_member(7, attempt=40))),
    ],
)
def test_a_block_cannot_change_between_its_frames(
    block: HiddenBlock, change: Callable[[pb.Frame], None]
) -> None:
    first, second, _ = frames_of(block, WIDE)
    change(second)
    assembler = Assembler(WIDE)
    assert assembler.add(first) is None
    assert refused(second, assembler) == "hidden.offset"


def test_what_is_repeated_is_told_by_the_first_frame_alone() -> None:
    forwards = (Replayed(5, 2), Replayed(6, 6))
    block = replace(a_block(rows=11, expected=WIDE), reply=pb.REPLY_COMPUTED, replayed=forwards)
    frames = frames_of(block, WIDE)
    assert [len(frame.hidden.replayed) for frame in frames] == [2, 0, 0]
    assembler = Assembler(WIDE)
    assert [assembler.add(frame) for frame in frames] == [None, None, block]
    assert assembler.add(frames[0]) is None
    frames[1].hidden.replayed.extend(frames[0].hidden.replayed)
    assert refused(frames[1], assembler) == "hidden.replayed"


NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
POSITIONS = st.integers(0, 2**32 - 16)
ATTEMPTS = st.integers(1, 2**64 - 1)
MEMBERS = st.builds(BlockMember, NAMES, ATTEMPTS, POSITIONS, kept_rows=st.none()).flatmap(
    lambda m: st.builds(m._replace, delta=st.integers(max(-m.position, -(2**31)), 0))
)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[HiddenBlock, StageLimits]:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    expected = StageLimits(
        placement=draw(st.text(max_size=8)),
        stage=draw(st.integers(0, 5)),
        dtype=dtype,
        hidden_size=draw(st.sampled_from([1, 64, 4096, 65_536])),
        max_rows=16,
        context_length=2**32,
        vocabulary=1000,
    )
    members = draw(
        st.lists(MEMBERS, min_size=1, max_size=MAX_TOGETHER, unique_by=lambda m: m.request)
    )
    reply, rows, replayed = pb.REPLY_ALL, 1, list[Replayed]()
    if len(members) == 1:
        rows = draw(st.integers(1, 16))
        reply = draw(st.sampled_from([pb.REPLY_ALL, pb.REPLY_LAST, pb.REPLY_COMPUTED]))
    if reply == pb.REPLY_ALL:
        kept_rows = [st.none() | st.integers(0, min(m.position, 16)) for m in members]
        members = [m._replace(kept_rows=draw(n)) for m, n in zip(members, kept_rows, strict=True)]
    borders = [pb.BORDER_UNSPECIFIED]
    if reply == pb.REPLY_COMPUTED and draw(st.booleans()):
        while (rest := rows - sum(each.rows for each in replayed)) > 0:
            forward = draw(st.integers(1, rest))
            replayed.append(Replayed(forward, draw(st.integers(1, forward))))
    elif reply == pb.REPLY_COMPUTED:
        borders += [pb.BORDER_KEPT, pb.BORDER_FIRST_TURN]
    has_places = reply != pb.REPLY_ALL and not replayed and draw(st.booleans())
    count = len(members) * rows
    size = count * expected.hidden_size * ITEM_BYTES[dtype]
    unit = draw(st.binary(min_size=1, max_size=64))
    block = HiddenBlock(
        members=tuple(members),
        rows=rows,
        tokens=tuple(draw(st.lists(st.integers(-(2**31), 999), min_size=count, max_size=count))),
        reply=reply,
        data=(unit * (size // len(unit) + 1))[:size],
        replayed=tuple(replayed),
        places=tuple(range(3 * rows)) if has_places else (),
        near_tie=draw(st.booleans()),
        border=draw(st.sampled_from(borders)),
    )
    return block, expected


@settings(deadline=None)
@given(blocks())
def test_cutting_and_putting_together_is_the_identity(
    case: tuple[HiddenBlock, StageLimits],
) -> None:
    block, expected = case
    frames = [pb.Frame.FromString(f.SerializeToString()) for f in frames_of(block, expected)]
    assembler = Assembler(expected)
    *before, whole = [assembler.add(frame) for frame in frames]
    assert before == [None] * (len(frames) - 1)
    assert whole == block


def test_the_checks_hold_without_asserts() -> None:
    """`python -O` drops every assert: none of the checks may be one."""
    nodes = ast.walk(ast.parse(Path(frames.__file__).read_text()))
    assert not [node for node in nodes if isinstance(node, ast.Assert)]
