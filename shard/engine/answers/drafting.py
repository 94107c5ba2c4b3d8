"""Whether a request drafts, how many tokens, and why not."""

import logging
from dataclasses import replace
from typing import Final

from ....mtp.drafting.acceptance import Acceptance
from ....mtp.drafting.costs import CostTable
from ....mtp.drafting.drafter_comparison import WORDS, DrafterComparison
from ....mtp.drafting.round_policy import DraftDemand, RoundPolicy
from ....mtp.families.family import Family
from ....mtp.types import DrafterKind
from ....placement.errors import InvalidRequest
from ....proto.fields import changed
from ...model.draft_pair import Head
from ...model.tensors import parked_reason
from ..drafter import DraftModel
from ..measuring import NOT_MEASURED
from ..options import EngineOptions
from ..request import Parameters
from .draft_profile import DraftProfile

log = logging.getLogger(__name__)
NO_IMAGES: Final = (
    "a block drafter does not draft answers about images: it was trained on rows of text alone"
)


class DraftControl:
    """Grants drafts to the requests of one engine, if it has a draft head that works."""

    def __init__(
        self,
        head: Head | None,
        family: Family | None,
        vocabulary: int,
        options: EngineOptions,
        profile: DraftProfile,
        policy: RoundPolicy,
    ) -> None:
        """`family` is None if the model gives no hidden states, or is split over stages."""
        # A card may name more ids than this checkpoint has: then all ids may be drafted.
        drafted = options.draft_vocabulary
        self.models = DraftModel.each_of(family, head, drafted if drafted < vocabulary else 0)
        """The drafters, of which one drafts at a time."""
        kinds: list[DrafterKind] = [*self.models] or ["native_mtp"]
        self.comparison = DrafterComparison(kinds[0])
        self.profiles: dict[DrafterKind, DraftProfile] = {
            kind: profile if kind == kinds[0] else profile.of(kind) for kind in kinds
        }
        """Costs and acceptance by what drafts."""
        self._policy = policy
        self.max_k = options.max_draft_tokens if head is not None else 0
        self.depth = self.max_k
        """The most drafts of a round: `max_k`, unless fewer are exact here."""
        self.limit_reason = ""
        """Why `depth` is below `max_k`."""
        self.off_reason = ""
        """Why the draft head is loaded but not used, at all or yet; empty if it is used."""
        self.is_near_tie = False
        """Whether a verify may decide near ties otherwise than single steps do."""
        self.parked_reason = ""
        """Why nothing is drafted any more: the drafter's logits were not finite. Where there is
        another one, until no answer is in progress."""
        self.depth_reason = ""
        """Why the last round drafted as many tokens as it did; empty before the first."""

    @property
    def refusal(self) -> str:
        """Why no request that begins now drafts; empty if some may."""
        lacks_costs = self.is_near_tie and len(self.profile.costs.probed) <= self.max_k
        return self.off_reason or self.parked_reason or (NOT_MEASURED if lacks_costs else "")

    def limit(self, depth: int, part: str) -> None:
        """Grants at most `depth` drafts. `part`: see `probing.part_of`."""
        self.depth = depth
        if depth < self.max_k:
            self.limit_reason = (
                f"at most {depth} of the model's {self.max_k} drafts a round, since a verify of "
                f"{depth + 2} rows does not compute what single steps do on this machine{part}"
            )
            log.info("%s", self.limit_reason)

    def park(self, position: int | None) -> None:
        """Grants no more drafts if an answer stopped drafting at `position`."""
        if position is not None and not self.parked_reason:
            self.parked_reason = parked_reason(position, WORDS[self.kind])
            log.warning("%s", self.parked_reason)

    def check(self, k: int) -> None:
        """Checks a request's K against this runner's most. Raises InvalidRequest."""
        if not 0 <= k <= self.max_k:
            raise InvalidRequest(
                f"num_draft_tokens {k} is not in this runner's range of 0 to {self.max_k}",
                param="num_draft_tokens",
            )

    def grants(self, k: int) -> bool:
        """Any thread: whether a request that asks for `k` drafts would draft."""
        return k > 0 and not self.refusal

    def grant(self, request: Parameters) -> Parameters:
        """The request with at most `depth` drafts, or without any if there is a `refusal`.

        Raises InvalidRequest.
        """
        self.check(request.k)
        changes = {"num_draft_tokens": 0, "adaptive_draft": False}
        if request.k and request.images and self.kind == "block_drafter":
            drafting = changed(request.drafting, **changes, drafting_reason=NO_IMAGES)
        elif request.k and not self.grants(request.k):
            drafting = changed(request.drafting, **changes, drafting_reason=self.refusal)
        elif request.k > self.depth:
            drafting = changed(request.drafting, num_draft_tokens=self.depth)
        else:
            return request
        return replace(request, drafting=drafting)

    def near_tie_drafts(self, request: Parameters) -> int:
        """The K of a granted request, where its drafts may decide near ties; else 0."""
        return request.k if self.is_near_tie else 0

    def demand(self, request: Parameters) -> DraftDemand:
        """The drafts of the head that a request asks for."""
        drafting, k = request.drafting, request.k
        limit_reason = self.limit_reason if k == self.depth else ""
        if not drafting.adaptive_draft or k == 0:
            source = drafting.initial_draft_source or "as requested"
            return DraftDemand(k, source, limit_reason=limit_reason)
        costs, own = self.profile.costs, None
        if self.is_near_tie:
            own = RoundPolicy(CostTable(costs.probed), follows_clock=False)
        return DraftDemand(
            k,
            drafting.initial_draft_source or "the most that the request allows",
            Acceptance(k, self.profile.prior, is_own=self.is_near_tie),
            min(drafting.initial_draft_tokens or k, k),
            own,
            limit_reason=limit_reason,
        )

    @property
    def kind(self) -> DrafterKind:
        """The drafter at present, where a request drafts by more than copies."""
        return self.comparison.kind

    @property
    def profile(self) -> DraftProfile:
        """The costs and the acceptance of the drafter at present."""
        return self.profiles[self.kind]

    @property
    def speedup(self) -> float:
        """See `RoundPolicy`: of all answers so far."""
        return self._speedup(self._policy, self.profile)

    @property
    def model(self) -> DraftModel | None:
        """The drafter at present, with the parts that it shares with the target; None if none."""
        return self.models.get(self.kind)

    def choose_drafter(self) -> None:
        """Chooses what drafts from now on, by its expected speed; no answer is in progress.

        Where drafts may decide near ties the first one drafts: there neither the clock nor other
        answers may change an answer.
        """
        if self.parked_reason and len(self.models) > 1:
            self._drop()
        if len(self.models) < 2 or self.is_near_tie or self.refusal:
            return
        before, speeds = self.kind, dict[DrafterKind, float]()
        for kind, each in self.profiles.items():
            speeds[kind] = self._speedup(RoundPolicy(each.costs), each)
        self.comparison.choose(speeds)
        if self.kind != before:
            self._policy.change_costs(self.profile.costs)

    def _drop(self) -> None:
        """Leaves drafting to the other drafter."""
        del self.models[self.kind], self.profiles[self.kind]
        (other,) = self.models
        self.comparison = DrafterComparison(other, f"{WORDS[other]} drafts: {self.parked_reason}")
        self.parked_reason = ""
        self._policy.change_costs(self.profile.costs)

    def _speedup(self, policy: RoundPolicy, profile: DraftProfile) -> float:
        acceptance = Acceptance(self.depth, profile.prior)
        return policy.speedup(DraftDemand(self.depth, acceptance=acceptance))
