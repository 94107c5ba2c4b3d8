"""Measurements of a model on this machine, which outlive restarts in one small file.

Costs and acceptance for adaptive drafting, `greedy_identity`, `batch_identity`, and copied drafts.
The key of a profile names everything that decides them: device, checkpoint, dtype, kernels, and the
versions of exo-node, MLX and mlx-lm. A profile holds no text and no token.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ....mtp.drafting.acceptance import Prior
from ....mtp.drafting.costs import LONGEST_S, RECENT, CostTable
from ....mtp.probe import Identity
from ....mtp.types import MAX_ROUND_ROWS
from ...checkpoint.files import read_bounded, write_atomic

log = logging.getLogger(__name__)

SAVE_EVERY_S = 10.0
MAX_BYTES = 1 << 20

_Seconds = Annotated[float, Field(ge=1e-9, le=LONGEST_S)]  # what is smaller may be 0 as a quotient
_Removal = Annotated[float, Field(ge=0, le=LONGEST_S)]
_Length = Annotated[int, Field(ge=1, le=63)]
_Size = Annotated[int, Field(ge=2, le=64)]
_Rows = Annotated[int, Field(ge=1, le=MAX_ROUND_ROWS)]
_Count = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True, slots=True)
class DraftProfileKey:
    """Everything that decides the measurements; profiles of different keys are independent."""

    device: str
    checkpoint: str
    dtype: str
    software: str
    """Versions, and names of the kernels that are used."""
    draft_vocabulary: int

    @property
    def file(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class _Cell(_Strict):
    bucket: int = Field(ge=0, le=32)
    k: int = Field(ge=0, le=8)
    seconds: list[_Seconds] = Field(max_length=RECENT)


class MeasuredIdentity(_Strict):
    """The identity of up to `k` drafts within a context length."""

    value: Identity
    k: int = Field(ge=0, le=8)
    context_length: int = Field(ge=1)
    limit: int | None = Field(default=None, ge=1, le=8)
    """The most drafts that are exact, if fewer than `k` are; None if all are, or none."""
    part: str = Field(default="", max_length=300)
    """See `probing.part_of`."""
    rows: _Rows = MAX_ROUND_ROWS
    """Rows of a round of several requests, at most."""

    @classmethod
    def of(
        cls, depth: int | None, k: int, context: int, part: str = "", rows: int = MAX_ROUND_ROWS
    ) -> Self:
        """`depth`: the most drafts that are exact; None if none are."""
        value: Identity = "near_tie" if depth is None else "bitwise"
        limit = None if depth == k else depth
        return cls(value=value, k=k, context_length=context, limit=limit, part=part, rows=rows)

    def is_of(self, k: int, context: int, rows: int = 0) -> bool:
        """Whether it was measured for up to `k` drafts, this context length, and rounds of at least
        `rows` rows."""
        return (self.k, self.context_length) == (k, context) and self.rows >= rows

    @property
    def depth(self) -> int:
        """The most drafts of a round: all where none are exact."""
        return self.limit or self.k


class MeasuredCopies(_Strict):
    """Lengths of copied drafts within a context length: which are exact, and seconds of each."""

    lengths: tuple[_Length, ...] = Field(min_length=1, max_length=8)
    exact: tuple[_Length, ...] = Field(max_length=8)
    context_length: int = Field(ge=1)
    verify: tuple[_Seconds, ...] = Field(max_length=9)
    """A plain token's, then of each length."""
    rollback: tuple[_Removal, ...] = Field(max_length=8)
    part: str = Field(default="", max_length=300)
    """See `probing.part_of`; empty if a length is exact."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = len(self.lengths)
        if (len(self.verify), len(self.rollback)) != (count + 1, count):
            raise ValueError("each length needs its seconds")
        if not set(self.exact) <= set(self.lengths):
            raise ValueError("an exact length was not measured")
        return self


class MeasuredSharedCopies(_Strict):
    """Lengths of copied drafts in batches: which are exact, and what rounds cost."""

    lengths: tuple[_Length, ...] = Field(max_length=8)
    exact: tuple[_Length, ...] = Field(max_length=8)
    context_length: int = Field(ge=1)
    ratios: tuple[tuple[_Size, _Length, _Seconds], ...] = Field(max_length=16)
    """(requests, length, seconds relative to a plain round) of exact lengths."""
    rows: _Rows = MAX_ROUND_ROWS
    """See `MeasuredIdentity`."""

    def is_of(self, lengths: Sequence[int], context: int, rows: int) -> bool:
        """Whether it was measured for these; see `MeasuredIdentity.is_of`."""
        same = (self.lengths, self.context_length) == (tuple(lengths), context)
        return same and self.rows >= rows


class _Stored(_Strict):
    """The schema of the file; a file that does not match is ignored."""

    key: dict[str, str | int]
    probed: list[_Seconds] = Field(max_length=9)
    cells: list[_Cell] = Field(max_length=33 * 9)
    observations: list[_Count] = Field(max_length=8, alias="seen")
    accepted: list[_Count] = Field(max_length=8)
    identity: MeasuredIdentity | None = None
    batch_identity: MeasuredIdentity | None = None
    shares_prompts: bool | None = None
    copies: MeasuredCopies | None = None
    shared_copies: MeasuredSharedCopies | None = None


@dataclass(slots=True)
class DraftProfile:
    """Costs, acceptance and identities in memory. Without `path` they are never saved."""

    key: DraftProfileKey
    path: Path | None
    clock: Callable[[], float]
    costs: CostTable = field(default_factory=CostTable)
    prior: Prior = field(default_factory=Prior)
    identity: MeasuredIdentity | None = None
    batch_identity: MeasuredIdentity | None = None
    shares_prompts: bool | None = None
    copies: MeasuredCopies | None = None
    shared_copies: MeasuredSharedCopies | None = None
    _saved_at: float | None = None

    @classmethod
    def open(cls, folder: str, key: DraftProfileKey, clock: Callable[[], float]) -> "DraftProfile":
        """Reads the profile of `key` from `folder`, or makes a new one if there is no usable file.

        `folder` "": nothing is read or saved.
        """
        profile = cls(key, Path(folder) / key.file if folder else None, clock)
        if profile.path is None or not profile.path.exists():
            return profile
        try:
            stored = _read(profile.path, key)
        except (OSError, ValueError) as fault:
            reason = "malformed" if isinstance(fault, ValidationError) else str(fault)
            log.warning("the saved speeds in %s cannot be used: %s", profile.path.name, reason)
            return profile
        cells = {(cell.bucket, cell.k): cell.seconds for cell in stored.cells}
        profile.costs = CostTable(stored.probed, cells)
        profile.prior = Prior(stored.observations, stored.accepted)
        profile.identity = stored.identity
        profile.batch_identity = stored.batch_identity
        profile.shares_prompts = stored.shares_prompts
        profile.copies = stored.copies
        profile.shared_copies = stored.shared_copies
        return profile

    def of(self, drafter: str) -> "DraftProfile":
        """The profile of another drafter of the same model."""
        key = replace(self.key, checkpoint=f"{self.key.checkpoint}, {drafter}")
        return DraftProfile.open(str(self.path.parent) if self.path else "", key, self.clock)

    def save(self, *, at_once: bool = False) -> None:
        """Writes the file, at most every SAVE_EVERY_S seconds unless `at_once`.

        Answers change a profile in small steps, a load's measurements are complete. A failure to
        write is logged: only later loads lose by it.
        """
        now = self.clock()
        recent = self._saved_at is not None and now - self._saved_at < SAVE_EVERY_S
        if self.path is None or (recent and not at_once):
            return
        self._saved_at = now
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, self._stored().model_dump_json(by_alias=True).encode())
        except OSError as fault:
            log.warning("measured speeds could not be saved: %s", fault.strerror)
        except ValidationError as fault:
            log.warning("measured speeds could not be saved: %s", _fields(fault))

    def _stored(self) -> _Stored:
        return _Stored(
            key=asdict(self.key),
            probed=list(self.costs.probed),
            cells=[_Cell(bucket=b, k=k, seconds=list(s)) for b, k, s in self.costs.cells()],
            seen=self.prior.counts,
            accepted=self.prior.hits,
            identity=self.identity,
            batch_identity=self.batch_identity,
            shares_prompts=self.shares_prompts,
            copies=self.copies,
            shared_copies=self.shared_copies,
        )


def _fields(fault: ValidationError) -> str:
    """The fields that failed validation, each with its reason."""
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in fault.errors())


def _read(path: Path, key: DraftProfileKey) -> _Stored:
    stored = _Stored.model_validate_json(read_bounded(path, MAX_BYTES))
    if stored.key != asdict(key):
        raise ValueError("it was measured for something else")
    if len(stored.observations) != len(stored.accepted):
        raise ValueError("its counts do not belong together")
    if any(a > n for a, n in zip(stored.accepted, stored.observations, strict=True)):
        raise ValueError("it counts more accepted drafts than there were")
    return stored
