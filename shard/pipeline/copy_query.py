"""The copies that stages compute exactly, which a query collects on its way through all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

from ...placement.errors import InvalidFrame
from ...proto import bounds
from ...proto import peer_pb2 as pb

MAX_LENGTHS: Final = 8
MAX_LENGTH: Final = 63
"""A round has at most 64 rows: a rollback reaches no further."""
MAX_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class ExactCopies:
    """Lengths of copied drafts whose rounds compute what single steps do on some stages, and the
    seconds of these rounds there."""

    lengths: Sequence[int] = ()
    """Copied tokens of a round, ascending."""
    verify_s: Sequence[float] = (0.0,)
    """Seconds of a plain row, then of a round of each length."""
    removal_s: Sequence[float] = ()
    """Seconds in which rows are taken back, for each length."""
    reason: str = ""
    """Why there is no length, if there is none."""

    @classmethod
    def none(cls, reason: str) -> Self:
        return cls(reason=reason[:MAX_REASON])

    @classmethod
    def measured(
        cls,
        lengths: Sequence[int],
        exact: Sequence[int],
        verify_s: Sequence[float],
        removal_s: Sequence[float],
    ) -> Self:
        """The `exact` ones of `lengths`. The seconds are those of all `lengths`."""
        plain, *verify = verify_s
        places = [place for place, length in enumerate(lengths) if length in exact]
        return cls(
            [lengths[place] for place in places],
            [plain, *(verify[place] for place in places)],
            [removal_s[place] for place in places],
        )

    def with_stage(self, other: "ExactCopies") -> "ExactCopies":
        """The copies that are exact here and on another stage, with the seconds of both."""
        if not self.lengths:
            return self
        common = [length for length in self.lengths if length in other.lengths]
        if not common:
            reason = other.reason or "no length of copies is exact on all stages"
            return ExactCopies.none(reason)
        mine, theirs = (
            [copies.lengths.index(length) for length in common] for copies in (self, other)
        )
        pairs = list(zip(mine, theirs, strict=True))
        verify = [self.verify_s[a + 1] + other.verify_s[b + 1] for a, b in pairs]
        removal = [self.removal_s[a] + other.removal_s[b] for a, b in pairs]
        return ExactCopies(common, [self.verify_s[0] + other.verify_s[0], *verify], removal)

    def to_wire(self) -> pb.CopyQuery:
        return pb.CopyQuery(
            lengths=self.lengths,
            verify_s=self.verify_s,
            removal_s=self.removal_s,
            reason=self.reason,
        )

    @classmethod
    def from_wire(cls, query: pb.CopyQuery) -> Self:
        """Reads a query that `check_copies` accepted."""
        return cls(
            tuple(query.lengths), tuple(query.verify_s), tuple(query.removal_s), query.reason
        )


def check_copies(query: pb.CopyQuery) -> None:
    """Checks a query or its answer. Raises InvalidFrame naming the field."""
    lengths = list(query.lengths)
    checks = (
        (
            "lengths",
            len(lengths) <= MAX_LENGTHS
            and all(1 <= length <= MAX_LENGTH for length in lengths)
            and all(a < b for a, b in pairwise(lengths)),
            f"at most {MAX_LENGTHS} ascending numbers from 1 to {MAX_LENGTH}",
        ),
        ("verify_s", len(query.verify_s) == len(lengths) + 1, "one more than the lengths"),
        ("removal_s", len(query.removal_s) == len(lengths), "as many as the lengths"),
        ("reason", len(query.reason) <= MAX_REASON, f"at most {MAX_REASON} characters"),
    )
    for field, is_valid, expectation in checks:
        if not is_valid:
            raise InvalidFrame(f"copies.{field} must be {expectation}", param=f"copies.{field}")
    if (violation := bounds.fault(query)) is not None:  # NaN and numbers below 0, too
        field = f"copies.{violation.field}"
        raise InvalidFrame(f"{field} {violation.text}", param=field)
