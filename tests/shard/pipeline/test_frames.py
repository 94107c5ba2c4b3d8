"""Tensor frames: every field is checked; cutting a block and joining it again is lossless."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.placement.errors import InvalidFrame
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.tensors import ITEM_BYTES
from exo_node.shard.pipeline.frames import MAX_DATA, Assembler, HiddenBlock, check_envelope, cut

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
    size = rows * expected.hidden_size * ITEM_BYTES[expected.dtype]
    return HiddenBlock(
        request=request,
        attempt=attempt,
        position=7,
        rows=rows,
        tokens=tuple(range(rows)),
        reply=pb.REPLY_ALL,
        data=bytes((i * 31 + len(request)) % 251 for i in range(251)) * (size // 251)
        + bytes(size % 251),
    )


def frames_of(block: HiddenBlock, expected: StageLimits = EXPECTED) -> list[pb.Frame]:
    return list(
        cut(block, expected.placement, expected.stage, expected.dtype, expected.hidden_size)
    )


def a_frame() -> pb.Frame:
    [frame] = frames_of(a_block())
    return frame


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
    ("hidden.position", 98),
    ("hidden.position", 2**64 - 1),
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
    ("hidden.tokens", [1, 2, 2**32 - 1]),
    ("hidden.reply", 0),
    ("hidden.reply", 5),
]
# Frames behind the first carry no tokens, so an offset that is off shows there first.
NAMED_INSTEAD = {"hidden.offset": "hidden.tokens"}


@pytest.mark.parametrize(
    ("field", "value"), MUTATIONS, ids=[f"{f}={str(v)[:24]!r}" for f, v in MUTATIONS]
)
def test_a_frame_with_one_wrong_field_is_refused_by_its_name(field: str, value: object) -> None:
    frame = a_frame()
    setting(field, value)(frame)
    assembler = Assembler(EXPECTED)
    with pytest.raises(InvalidFrame) as caught:
        _ = assembler.add(frame)
    assert caught.value.param == NAMED_INSTEAD.get(field, field)
    assert assembler.add(a_frame()) == a_block(), "the refused frame left something behind"


def test_a_frame_of_no_kind_is_refused() -> None:
    with pytest.raises(InvalidFrame) as caught:
        _ = Assembler(EXPECTED).add(pb.Frame(placement="p1", request="r1", attempt=1))
    assert caught.value.param == "kind"


@pytest.mark.parametrize("schedule", [[3, 1], [0, 3], [4], [1]])
def test_a_schedule_that_is_not_the_blocks_is_refused(schedule: list[int]) -> None:
    frame = a_frame()
    frame.hidden.schedule.extend(schedule)
    with pytest.raises(InvalidFrame) as caught:
        _ = Assembler(EXPECTED).add(frame)
    assert caught.value.param == "hidden.schedule"


def test_a_schedule_that_adds_up_travels_with_its_block() -> None:
    sent = replace(a_block(), schedule=(1, 2))
    [frame] = frames_of(sent)
    assert Assembler(EXPECTED).add(frame) == sent


def a_question() -> pb.Frame:
    told = pb.PrefixQuery(tokens=range(44, 50), schedule=[4, 2], held=[4, 6])
    return pb.Frame(placement="p1", request="r1", attempt=1, prefix=told)


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
    sent = replace(a_block(), reply=pb.REPLY_COMPUTED, border=pb.BORDER_FIRST_TURN)
    [frame] = frames_of(sent)
    assert Assembler(EXPECTED).add(frame) == sent
    for changed in (
        replace(sent, reply=pb.REPLY_ALL),
        replace(sent, reply=pb.REPLY_LAST),
        replace(sent, schedule=(1, 2)),
        replace(sent, border=cast("Any", 3)),
    ):
        [frame] = frames_of(changed)
        with pytest.raises(InvalidFrame) as caught:
            _ = Assembler(EXPECTED).add(frame)
        assert caught.value.param == "hidden.border"


def test_the_frame_that_the_mutations_start_from_is_accepted() -> None:
    assert Assembler(EXPECTED).add(a_frame()) == a_block()


def test_the_last_rows_of_the_context_and_the_last_id_are_accepted() -> None:
    frame = a_frame()
    frame.hidden.position = 97
    setting("hidden.tokens", [49, 49, 49])(frame)
    assert Assembler(EXPECTED).add(frame) is not None


def test_data_that_is_too_short_never_becomes_a_block() -> None:
    frame = a_frame()
    frame.hidden.data = frame.hidden.data[:-1]
    assembler = Assembler(EXPECTED)
    assert assembler.add(frame) is None
    with pytest.raises(InvalidFrame) as caught:
        _ = assembler.add(a_frame())
    assert caught.value.param == "hidden.offset"


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


def test_a_block_of_exactly_one_mebibyte_is_one_frame() -> None:
    block = a_block(rows=4, expected=WIDE)
    [frame] = frames_of(block, WIDE)
    assert Assembler(WIDE).add(frame) == block


def test_the_frames_of_interleaved_requests_do_not_mix() -> None:
    blocks = [a_block(f"request-{'x' * n}", rows=5 + 3 * n, expected=WIDE) for n in range(3)]
    turns = zip_longest(*(frames_of(block, WIDE) for block in blocks))
    assembler = Assembler(WIDE)
    done = [assembler.add(frame) for frame in chain(*turns) if frame is not None]
    whole = {block.request: block for block in done if block is not None}
    assert whole == {block.request: block for block in blocks}


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 0), (0, 1, 1)], ids=str)
def test_frames_out_of_order_are_refused(order: tuple[int, ...]) -> None:
    frames = frames_of(a_block(rows=11, expected=WIDE), WIDE)
    assembler = Assembler(WIDE)
    for index in order[:-1]:
        assert assembler.add(frames[index]) is None
    with pytest.raises(InvalidFrame) as caught:
        _ = assembler.add(frames[order[-1]])
    assert caught.value.param == "hidden.offset"


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempt", 3), ("hidden.position", 8), ("hidden.reply", pb.REPLY_LAST)],
    ids=lambda x: str(x),
)
def test_a_block_cannot_change_between_its_frames(field: str, value: object) -> None:
    first, second, _ = frames_of(a_block(rows=11, expected=WIDE), WIDE)
    setting(field, value)(second)
    assembler = Assembler(WIDE)
    assert assembler.add(first) is None
    with pytest.raises(InvalidFrame, match=r"hidden\.offset"):
        _ = assembler.add(second)


def test_what_a_forgotten_request_left_open_does_not_spoil_its_next_block() -> None:
    block = a_block(rows=11, expected=WIDE)
    frames = frames_of(block, WIDE)
    assembler = Assembler(WIDE)
    assert assembler.add(frames[0]) is None
    assembler.forget(block.request)
    assert [assembler.add(frame) for frame in frames] == [None, None, block]


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
    rows = draw(st.integers(1, 16))
    size = rows * expected.hidden_size * ITEM_BYTES[dtype]
    unit = draw(st.binary(min_size=1, max_size=64))
    block = HiddenBlock(
        request=draw(st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)),
        attempt=draw(st.integers(1, 2**64 - 1)),
        position=draw(st.integers(0, 2**32 - 16)),
        rows=rows,
        tokens=tuple(draw(st.lists(st.integers(0, 999), min_size=rows, max_size=rows))),
        reply=draw(
            st.sampled_from([pb.REPLY_ALL, pb.REPLY_LAST, pb.REPLY_NONE, pb.REPLY_COMPUTED])
        ),
        data=(unit * (size // len(unit) + 1))[:size],
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
    program = (
        "import test_frames as t\n"
        "assert False, 'asserts are on'\n"
        "for field, value in t.MUTATIONS:\n"
        "    frame = t.a_frame()\n"
        "    t.setting(field, value)(frame)\n"
        "    try:\n"
        "        t.Assembler(t.EXPECTED).add(frame)\n"
        "    except t.InvalidFrame:\n"
        "        continue\n"
        "    raise SystemExit(f'{field} = {value!r} was accepted')\n"
        "print(len(t.MUTATIONS))\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{len(MUTATIONS)}\n"), done.stderr
