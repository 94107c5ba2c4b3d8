"""A model's own draft head and a block drafter in memory together, either of which may draft.

Both read every row, so that the next answer may begin with the other one.
"""

from typing import NamedTuple

import mlx.core as mx

from ...mtp.caches.rollback import RowCache, cache_of, parts_of
from ...mtp.families.family import Family
from ...mtp.families.head import DraftHead
from ...mtp.families.table import family_of
from ...mtp.targets import FamilyTarget, TappedTarget, WholeTarget
from .block_drafter import BlockDrafter
from .stage_model import StageModel, target_of


class DraftPair(NamedTuple):
    """A head and a drafter. A row has the head's hidden state, then the drafter's, of its width."""

    family: Family
    """The one that the head is fed by."""
    head: DraftHead
    drafter: BlockDrafter

    @property
    def fingerprint(self) -> str:
        """Separates what is kept of both from what is kept of the drafter alone."""
        return f"{self.drafter.fingerprint} and a head"

    def target(self, target: FamilyTarget | WholeTarget) -> TappedTarget:
        """The target as it is decoded with both."""
        return self.drafter.target(target, with_hidden=True)

    def make_cache(self) -> RowCache:
        """The parts of the head's cache, then the drafter's, without rows."""
        head, drafter = self.head.make_cache(), self.drafter.make_cache()
        return cache_of([*parts_of(head), *parts_of(drafter)])

    def read(self, hidden: mx.array, embedding: mx.array, cache: RowCache) -> mx.array:
        """Appends rows of `target` to both caches. Returns the head's output and the embeddings.

        A head that drafts row by row appends rows to the drafter's cache as well, which are dropped
        with its own.
        """
        (of_head, of_drafter), (head_cache, drafter_cache) = self._split(hidden), self._parts(cache)
        read = self.drafter.read(of_drafter, embedding, drafter_cache)
        out = self.head(of_head, embedding, head_cache)
        return mx.concatenate([out, read.astype(out.dtype)], axis=-1)

    def of_head(self, output: mx.array) -> mx.array:
        """The head's part of `read`."""
        return self._split(output)[0]

    def block(self, output: mx.array, k: int, cache: RowCache) -> mx.array:
        """The drafter's block after an output of `read`."""
        return self.drafter.block(self._split(output)[1], k, self._parts(cache)[1])

    def _split(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        width = self.drafter.width
        return rows[..., :-width], rows[..., -width:]

    def _parts(self, cache: RowCache) -> tuple[RowCache, RowCache]:
        parts = parts_of(cache)
        count = len(parts) - self.drafter.num_caches
        return cache_of(parts[:count]), cache_of(parts[count:])


Head = DraftHead | BlockDrafter | DraftPair
"""A drafter of a model, or a pair of them."""


def own_head(head: Head | None) -> DraftHead | None:
    """The model's own one of them."""
    own = head.head if isinstance(head, DraftPair) else head
    return own if isinstance(own, DraftHead) else None


def targets_of(
    stage: StageModel, head: Head | None, *, whole: bool = True
) -> tuple[Family | None, FamilyTarget | WholeTarget | TappedTarget]:
    """The family whose hidden states a `DraftHead` is fed, if any, and the target that gives what
    `head` is fed. `whole`: whether all layers are here."""
    own = own_head(head)
    family = family_of(stage.model, own.hidden_kind if own else None) if whole else None
    target = target_of(stage, family)
    if isinstance(head, BlockDrafter | DraftPair):
        return None, head.target(target)
    return family, target
