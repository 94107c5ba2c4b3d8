"""Tensor frames: blocks are cut for the wire, checked before allocation, and joined again."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ...placement.errors import InvalidFrame
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..model.tensors import ITEM_BYTES, WIRE
from .copy_query import check_copies

MAX_DATA = 1 << 20
"""Bytes of tensor data in one frame; gRPC's default limit for a message is 4 MiB."""
MAX_TOGETHER = 16
"""Requests in one block, at most: as many as run at once."""
REQUEST_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_Check = tuple[str, bool, object]
"""A field, whether it is valid, and what it must be."""


class BlockMember(NamedTuple):
    """One request in a block."""

    request: str
    attempt: int
    position: int
    """Committed rows before the block."""
    delta: int = 0
    """The difference of its positions from row numbers; see `RopePositions`."""
    kept_rows: int | None = None
    """Rows of its last round that stay, if that copied drafts: stages take the others back."""

    @property
    def key(self) -> tuple[str, int]:
        """The key of the request's state on every stage."""
        return self.request, self.attempt


class Replayed(NamedTuple):
    """One forward of an earlier attempt."""

    rows: int
    kept_rows: int
    """Number of its rows, the first ones, that stay."""


@dataclass(frozen=True, slots=True)
class HiddenBlock:
    """Hidden states of one or several requests, complete."""

    members: tuple[BlockMember, ...]
    """In the order of the rows. If there are several, each has one row, after its prompt."""
    rows: int
    """Rows of each request."""
    tokens: tuple[int, ...]
    """The ids of all rows, request by request."""
    reply: "pb.Reply.ValueType"
    data: bytes
    """(requests, rows, hidden_size) in the wire's order."""
    replayed: tuple[Replayed, ...] = ()
    """The forwards of an earlier attempt that the block repeats, or empty if it is one forward."""
    near_tie: bool = False
    """Whether a stage computed it in a shared forward that may round otherwise than a single one.
    """
    places: tuple[int, ...] = ()
    """(3, rows) positions of a chunk with rows of images, or empty if `delta` gives them."""
    border: "pb.Border.ValueType" = pb.BORDER_UNSPECIFIED
    """Whether stages cache the state after it; see `shard/engine/prefixes/borders.py`."""

    @property
    def is_round(self) -> bool:
        """Whether it is a round of decoding; else it has rows of a prompt or of a log."""
        return self.reply == pb.REPLY_ALL

    @property
    def kept_rows(self) -> int:
        """Rows of each request that stay in the caches."""
        return sum(forward.kept_rows for forward in self.replayed) if self.replayed else self.rows


def cut(
    block: HiddenBlock, placement: str, stage: int, dtype: str, hidden_size: int
) -> Iterator[pb.Frame]:
    """The frames of a block for `stage`, or back to the first stage if it is num_stages.

    A chunk without data becomes a frame that confirms its computation.
    """
    first = block.members[0]
    if block.reply == pb.REPLY_COMPUTED and not block.data:
        computed = pb.Computed(position=first.position)
        yield pb.Frame(
            placement=placement, request=first.request, attempt=first.attempt, computed=computed
        )
    members = [pb.Member(**member._asdict()) for member in block.members]
    replayed = [pb.Replayed(**forward._asdict()) for forward in block.replayed]
    for offset in range(0, len(block.data), MAX_DATA):
        hidden = pb.Hidden(
            stage=stage,
            rows=block.rows,
            dtype=WIRE[dtype],
            shape=(len(members), block.rows, hidden_size),
            offset=offset,
            data=block.data[offset : offset + MAX_DATA],
            tokens=block.tokens if offset == 0 else (),
            reply=block.reply,
            near_tie=block.near_tie,
            border=block.border,
            members=members,
            replayed=replayed if offset == 0 else (),
            places=block.places if offset == 0 else (),
        )
        yield pb.Frame(
            placement=placement, request=first.request, attempt=first.attempt, hidden=hidden
        )


def members_of(frame: pb.Frame) -> list[tuple[str, int]]:
    """The requests and attempts that a frame concerns."""
    members = [(m.request, int(m.attempt)) for m in frame.hidden.members]
    return members or [(frame.request, int(frame.attempt))]


def check_envelope(frame: pb.Frame, expected: StageLimits) -> None:
    """Checks the fields that all frames have. Raises InvalidFrame naming the field."""
    if frame.placement != expected.placement:
        raise InvalidFrame("the frame belongs to another placement", param="placement")
    _check_name(frame.request, frame.attempt, "")
    kind = frame.WhichOneof("kind")
    if kind is None:
        raise InvalidFrame("the frame has no kind", param="kind")
    if kind == "prefix":
        check_prefix(frame.prefix, expected)
    if kind == "copies":
        check_copies(frame.copies)


def _check_name(request: str, attempt: int, within: str) -> None:
    if not REQUEST_NAME.fullmatch(request):
        raise InvalidFrame(
            f"{within}request is not 1 to 64 letters, digits, - or _", param=f"{within}request"
        )
    if attempt < 1:
        raise InvalidFrame(f"{within}attempt counts from 1", param=f"{within}attempt")


def check_prefix(prefix: pb.PrefixQuery, expected: StageLimits) -> None:
    """Checks a prefix query against the placement. Raises InvalidFrame naming the field."""
    tokens, schedule = prefix.tokens, prefix.schedule
    if not 1 <= len(tokens) <= expected.context_length or max(tokens) >= expected.vocabulary:
        raise InvalidFrame(
            f"prefix.tokens must be 1 to {expected.context_length} ids of the vocabulary",
            param="prefix.tokens",
        )
    fits = sum(schedule) == len(tokens) and 1 <= min(schedule) <= max(schedule)
    if not fits or max(schedule) > expected.max_rows:
        raise InvalidFrame(
            f"prefix.schedule must be forwards of 1 to {expected.max_rows} rows that add up to "
            "those of prefix.tokens",
            param="prefix.schedule",
        )
    if not set(prefix.held) <= set(accumulate(schedule)):
        raise InvalidFrame(
            "prefix.held must be rows after forwards of prefix.schedule", param="prefix.held"
        )


def check_hidden(frame: pb.Frame, expected: StageLimits) -> None:
    """Checks hidden states against the placement. Raises InvalidFrame naming the field."""
    hidden = frame.hidden
    for field, is_valid, expectation in (
        *_block_checks(frame, expected),
        *_member_checks(hidden, expected),
        *_prompt_checks(hidden, expected),
    ):
        if not is_valid:
            raise InvalidFrame(f"hidden.{field} must be {expectation}", param=f"hidden.{field}")
    for member in hidden.members:
        _check_name(member.request, member.attempt, "hidden.members.")
    total = math.prod(hidden.shape) * ITEM_BYTES[expected.dtype]
    if hidden.offset + len(hidden.data) > total:
        raise InvalidFrame(
            f"hidden.data ends at byte {hidden.offset + len(hidden.data)} of {total}",
            param="hidden.data",
        )


def _block_checks(frame: pb.Frame, expected: StageLimits) -> Iterator[_Check]:
    """The checks of every block of hidden states."""
    hidden, members = frame.hidden, frame.hidden.members
    shape = [len(members), hidden.rows, expected.hidden_size]
    yield "stage", hidden.stage == expected.stage, expected.stage
    yield "dtype", hidden.dtype == WIRE[expected.dtype], expected.dtype
    yield "rows", 1 <= hidden.rows <= expected.max_rows, f"1 to {expected.max_rows}"
    yield (
        "members",
        1 <= len(members) <= MAX_TOGETHER
        and len({member.request for member in members}) == len(members)
        and (members[0].request, members[0].attempt) == (frame.request, frame.attempt),
        f"1 to {MAX_TOGETHER} different requests, the frame's first",
    )
    yield (
        "reply",
        hidden.reply in (pb.REPLY_ALL, pb.REPLY_LAST, pb.REPLY_COMPUTED),
        "all, last or computed",
    )
    yield "shape", list(hidden.shape) == shape, shape
    yield "data", 1 <= len(hidden.data) <= MAX_DATA, f"1 to {MAX_DATA} bytes"


def _member_checks(hidden: pb.Hidden, expected: StageLimits) -> Iterator[_Check]:
    """The place of each request's rows in its cache."""
    members = hidden.members
    yield (
        "members",
        len(members) == 1 or (hidden.rows == 1 and hidden.reply == pb.REPLY_ALL),
        "one, unless each has one row after its prompt",
    )
    yield (
        "members.position",
        all(m.position + hidden.rows <= expected.context_length for m in members),
        f"at most {expected.context_length} minus the rows",
    )
    yield (
        "members.delta",
        all(0 <= -m.delta <= m.position for m in members),
        "0, or below by no more rows than there are",
    )
    yield (
        "members.kept_rows",
        all(
            not m.HasField("kept_rows")
            or (hidden.reply == pb.REPLY_ALL and m.kept_rows <= min(m.position, expected.max_rows))
            for m in members
        ),
        f"of a round, and at most {expected.max_rows} of the rows before it",
    )


def _prompt_checks(hidden: pb.Hidden, expected: StageLimits) -> Iterator[_Check]:
    """The fields that the first frame of a block alone has, or a forward over a prompt."""
    replayed, first = hidden.replayed, hidden.offset == 0
    yield (
        "tokens",
        len(hidden.tokens) == (len(hidden.members) * hidden.rows if first else 0)
        and all(token < expected.vocabulary for token in hidden.tokens),
        "one id of the vocabulary for each row, in the first frame",
    )
    yield (
        "replayed",
        not replayed
        or (
            first
            and hidden.reply == pb.REPLY_COMPUTED
            and all(1 <= forward.kept_rows <= forward.rows for forward in replayed)
            and sum(forward.rows for forward in replayed) == hidden.rows
        ),
        "forwards that keep a row at least and whose rows add up to the block's, in the first "
        "frame",
    )
    yield (
        "places",
        not hidden.places
        or (
            first
            and len(hidden.places) == 3 * hidden.rows
            and hidden.reply != pb.REPLY_ALL
            and not replayed
            and max(hidden.places) < expected.context_length
        ),
        "three below the context's length for each row of a forward over a prompt, in the "
        "first frame",
    )
    yield (
        "border",
        hidden.border == pb.BORDER_UNSPECIFIED
        or (
            hidden.border in (pb.BORDER_KEPT, pb.BORDER_FIRST_TURN)
            and hidden.reply == pb.REPLY_COMPUTED
            and not replayed
        ),
        "one of a single forward within a prompt",
    )


class Assembler:
    """Joins the frames of one stream into blocks: a block's frames follow each other."""

    def __init__(self, expected: StageLimits) -> None:
        self._expected = expected
        self._open: list[pb.Frame] = []

    def add(self, frame: pb.Frame) -> HiddenBlock | None:
        """Adds a frame. Returns the block if this frame completes it. Raises InvalidFrame."""
        parts, self._open = self._open, []
        check_envelope(frame, self._expected)
        hidden = frame.hidden
        check_hidden(frame, self._expected)
        if hidden.offset == 0:
            parts = []  # an incomplete block before it is dropped
        received = sum(len(part.hidden.data) for part in parts)
        if hidden.offset != received or (parts and not _continues(parts[0], frame)):
            raise InvalidFrame(
                f"hidden.offset must be {received}: a block's frames come in order",
                param="hidden.offset",
            )
        parts.append(frame)
        size = self._expected.hidden_size * ITEM_BYTES[self._expected.dtype]
        if received + len(hidden.data) < len(hidden.members) * hidden.rows * size:
            self._open = parts
            return None
        return _joined(parts)


def _continues(first: pb.Frame, frame: pb.Frame) -> bool:
    a, b = first.hidden, frame.hidden
    return (a.rows, a.reply) == (b.rows, b.reply) and list(a.members) == list(b.members)


def _joined(parts: Sequence[pb.Frame]) -> HiddenBlock:
    first = parts[0].hidden
    data = [part.hidden.data for part in parts]
    return HiddenBlock(
        members=tuple(_member(m) for m in first.members),
        rows=first.rows,
        tokens=tuple(first.tokens),
        reply=first.reply,
        data=data[0] if len(data) == 1 else b"".join(data),
        replayed=tuple(Replayed(each.rows, each.kept_rows) for each in first.replayed),
        near_tie=first.near_tie,
        places=tuple(first.places),
        border=first.border,
    )


def _member(wire: pb.Member) -> BlockMember:
    kept_rows = wire.kept_rows if wire.HasField("kept_rows") else None
    return BlockMember(wire.request, int(wire.attempt), int(wire.position), wire.delta, kept_rows)
