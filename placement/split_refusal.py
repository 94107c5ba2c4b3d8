"""Why a model may be split at some borders only, or nowhere, as its class showed when checked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_PARAM: Final = "pipeline"
_MAX_BORDERS: Final = 1024
_WRITTEN: Final = re.compile(rf"{_PARAM}(?::(\d{{1,4}}(?:,\d{{1,4}}){{0,{_MAX_BORDERS - 1}}}))?")


@dataclass(frozen=True, slots=True)
class SplitRefusal:
    """False where the model may be split anywhere, as far as is known."""

    reason: str = ""
    borders: frozenset[int] = frozenset()
    """The layers that a stage may begin with. Without any the model runs on one node only."""

    def __bool__(self) -> bool:
        return bool(self.reason)

    @property
    def forbids(self) -> bool:
        """Whether the model must not be split at all."""
        return bool(self.reason) and not self.borders

    @property
    def param(self) -> str:
        """The `param` of the error that carries it from a runner to the nodes."""
        return ":".join((_PARAM, ",".join(map(str, sorted(self.borders))))).removesuffix(":")

    def allows(self, counts: Sequence[int]) -> bool:
        """Whether stages of these numbers of layers meet at allowed borders only."""
        return not self.reason or set(list(accumulate(counts))[:-1]) <= self.borders

    def may_end_at(self, end: int, layers: int) -> bool:
        """Whether a stage of a model of `layers` layers may end there."""
        return not self.reason or end == layers or end in self.borders

    def __str__(self) -> str:
        if not self.borders:
            return self.reason
        return f"{self.reason} (stages may begin at layer {_listed(sorted(self.borders))})"


MAY_BE_SPLIT: Final = SplitRefusal()
EMBEDDER: Final = SplitRefusal(
    "it is an embedder, whose hidden states are read where all layers are"
)


def refusal_in(param: str | None, message: str) -> SplitRefusal:
    """The refusal in an error's `param`; `MAY_BE_SPLIT` where it is about something else."""
    match = _WRITTEN.fullmatch(param or "")
    if match is None:
        return MAY_BE_SPLIT
    return SplitRefusal(message, frozenset(map(int, filter(None, (match[1] or "").split(",")))))


def _listed(borders: Sequence[int]) -> str:
    texts = [str(border) for border in borders[:12]]
    return ", ".join(texts) + (", …" if len(borders) > len(texts) else "")
