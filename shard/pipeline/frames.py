"""Tensor frames: cut for the wire, checked before anything is allocated, put together again."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...placement.errors import InvalidFrame
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..model.tensors import ITEM_BYTES, WIRE

MAX_DATA = 1 << 20
"""Bytes of tensor data in one frame; gRPC's default limit for a message is 4 MiB."""
MAX_TOGETHER = 16
"""Requests whose rows travel in one frame: as many as run at once."""
REQUEST_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class HiddenBlock:
    """Rows of hidden states, complete. `data` is (1, rows, hidden_size) in the wire's order."""

    request: str
    attempt: int
    position: int
    rows: int
    tokens: tuple[int, ...]
    reply: "pb.Reply.ValueType"
    data: bytes
    schedule: tuple[int, ...] = ()
    """Rows of each forward that the block stands for, as a resume repeats them; empty: one."""
    near_tie: bool = False
    """Computed with other requests on a stage where that was measured to round otherwise."""
    border: "pb.Border.ValueType" = pb.BORDER_UNSPECIFIED
    """What is kept of the state behind it; see `prefixes.py`."""


def cut(
    block: HiddenBlock, placement: str, stage: int, dtype: str, hidden_size: int
) -> Iterator[pb.Frame]:
    """The frames of a block for `stage` (num_stages: for the generator).

    Of a chunk that comes back, which has no data, word that it was computed.
    """
    if block.reply == pb.REPLY_COMPUTED and not block.data:
        computed = pb.Computed(position=block.position)
        yield pb.Frame(
            placement=placement, request=block.request, attempt=block.attempt, computed=computed
        )
    for offset in range(0, len(block.data), MAX_DATA):
        hidden = pb.Hidden(
            stage=stage,
            position=block.position,
            rows=block.rows,
            dtype=WIRE[dtype],
            shape=(1, block.rows, hidden_size),
            offset=offset,
            data=block.data[offset : offset + MAX_DATA],
            tokens=block.tokens if offset == 0 else (),
            reply=block.reply,
            schedule=block.schedule if offset == 0 else (),
            near_tie=block.near_tie,
            border=block.border,
        )
        yield pb.Frame(
            placement=placement, request=block.request, attempt=block.attempt, hidden=hidden
        )


def cut_all(
    blocks: Sequence[HiddenBlock], placement: str, stage: int, dtype: str, hidden_size: int
) -> list[pb.Frame]:
    """The frames of several blocks; those of single rows of several requests travel as one."""
    frames = {id(b): list(cut(b, placement, stage, dtype, hidden_size)) for b in blocks}
    single = [b for b in blocks if b.rows == 1 and b.data and len(frames[id(b)]) == 1]
    if not 1 < len({b.request for b in single}) == len(single) <= MAX_TOGETHER:
        single = []  # several rows of one request keep their order
    chosen = {id(b) for b in single}
    rest = [frame for b in blocks if id(b) not in chosen for frame in frames[id(b)]]
    if not single:
        return rest
    together = pb.Together(frames=[frame for b in single for frame in frames[id(b)]])
    first = single[0]
    envelope = pb.Frame(
        placement=placement, request=first.request, attempt=first.attempt, together=together
    )
    return [envelope, *rest]


def parts_of(together: pb.Together) -> Sequence[pb.Frame]:
    """Raises InvalidFrame where they are not what `cut_all` makes of its blocks."""
    parts = together.frames
    if not 2 <= len(parts) <= MAX_TOGETHER:
        raise InvalidFrame(f"together.frames must be 2 to {MAX_TOGETHER}", param="together.frames")
    if any(part.WhichOneof("kind") != "hidden" or part.hidden.rows != 1 for part in parts):
        raise InvalidFrame(
            "together.frames must be hidden states of one row each", param="together.frames"
        )
    if len({part.request for part in parts}) < len(parts):
        raise InvalidFrame("together.frames must be of different requests", param="together.frames")
    return parts


def check_envelope(frame: pb.Frame, expected: StageLimits) -> None:
    """What every kind of frame must carry. Raises InvalidFrame naming the field."""
    if frame.placement != expected.placement:
        raise InvalidFrame("the frame belongs to another placement", param="placement")
    if not REQUEST_NAME.fullmatch(frame.request):
        raise InvalidFrame("request is not 1 to 64 letters, digits, - or _", param="request")
    if frame.attempt < 1:
        raise InvalidFrame("attempt counts from 1", param="attempt")
    kind = frame.WhichOneof("kind")
    if kind is None:
        raise InvalidFrame("the frame has no kind", param="kind")
    if kind == "prefix":
        check_prefix(frame.prefix, expected)


def check_prefix(prefix: pb.PrefixQuery, expected: StageLimits) -> None:
    """Raises InvalidFrame naming the field."""
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
            "prefix.held must be rows behind forwards of prefix.schedule", param="prefix.held"
        )


def check_hidden(hidden: pb.Hidden, expected: StageLimits) -> None:
    """A frame of hidden states against the placement. Raises InvalidFrame naming the field."""
    shape = (1, hidden.rows, expected.hidden_size)
    checks = (
        ("stage", hidden.stage == expected.stage, expected.stage),
        ("dtype", hidden.dtype == WIRE[expected.dtype], expected.dtype),
        ("rows", 1 <= hidden.rows <= expected.max_rows, f"1 to {expected.max_rows}"),
        ("shape", tuple(hidden.shape) == shape, list(shape)),
        (
            "position",
            hidden.position + hidden.rows <= expected.context_length,
            f"at most {expected.context_length} minus the rows",
        ),
        ("reply", hidden.reply in (1, 2, 3, 4), "all, last, none or computed"),
        ("data", 1 <= len(hidden.data) <= MAX_DATA, f"1 to {MAX_DATA} bytes"),
        (
            "tokens",
            len(hidden.tokens) == (hidden.rows if hidden.offset == 0 else 0)
            and all(token < expected.vocabulary for token in hidden.tokens),
            "one id of the vocabulary for each row, in the first frame",
        ),
        (
            "schedule",
            not hidden.schedule
            or (
                (hidden.offset == 0 and 0 not in hidden.schedule)
                and sum(hidden.schedule) == hidden.rows
            ),
            "of forwards whose rows add up to the block's, in the first frame",
        ),
        (
            "border",
            hidden.border == pb.BORDER_UNSPECIFIED
            or (
                hidden.border in (pb.BORDER_KEPT, pb.BORDER_FIRST_TURN)
                and hidden.reply in (pb.REPLY_NONE, pb.REPLY_COMPUTED)
                and not hidden.schedule
            ),
            "one of a single forward within a prompt",
        ),
    )
    for field, good, wanted in checks:
        if not good:
            raise InvalidFrame(f"hidden.{field} must be {wanted}", param=f"hidden.{field}")
    total = math.prod(shape) * ITEM_BYTES[expected.dtype]
    if hidden.offset + len(hidden.data) > total:
        raise InvalidFrame(
            f"hidden.data ends at byte {hidden.offset + len(hidden.data)} of {total}",
            param="hidden.data",
        )


class Assembler:
    """Puts the frames of one stream's blocks together; at most one block a request is open."""

    def __init__(self, expected: StageLimits) -> None:
        self._expected = expected
        self._open: dict[str, list[pb.Frame]] = {}

    def add(self, frame: pb.Frame) -> HiddenBlock | None:
        """The block that this frame completes, if it does. Raises InvalidFrame."""
        check_envelope(frame, self._expected)
        hidden = frame.hidden
        check_hidden(hidden, self._expected)
        parts = self._open.pop(frame.request, [])
        received = sum(len(part.hidden.data) for part in parts)
        if hidden.offset != received or (parts and not _continues(parts[0], frame)):
            raise InvalidFrame(
                f"hidden.offset must be {received}: a block's frames come in order",
                param="hidden.offset",
            )
        parts.append(frame)
        size = self._expected.hidden_size * ITEM_BYTES[self._expected.dtype]
        if received + len(hidden.data) < hidden.rows * size:
            self._open[frame.request] = parts
            return None
        return _joined(parts)

    def forget(self, request: str) -> None:
        """Drops what a request that ended left open."""
        _ = self._open.pop(request, None)


def _continues(first: pb.Frame, frame: pb.Frame) -> bool:
    a, b = first.hidden, frame.hidden
    same_block = (a.position, a.rows, a.reply) == (b.position, b.rows, b.reply)
    return first.attempt == frame.attempt and same_block


def _joined(parts: Sequence[pb.Frame]) -> HiddenBlock:
    first = parts[0]
    data = [part.hidden.data for part in parts]
    return HiddenBlock(
        request=first.request,
        attempt=first.attempt,
        position=first.hidden.position,
        rows=first.hidden.rows,
        tokens=tuple(first.hidden.tokens),
        reply=first.hidden.reply,
        data=data[0] if len(data) == 1 else b"".join(data),
        schedule=tuple(first.hidden.schedule),
        near_tie=first.hidden.near_tie,
        border=first.hidden.border,
    )
