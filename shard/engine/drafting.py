"""Who drafts for a request, how many tokens, and why nobody does."""

import logging
from dataclasses import replace

from ...mtp.depth import AdaptiveDepth, DepthPolicy, FixedDepth
from ...mtp.family import Family, draft_logits
from ...mtp.head import DraftHead
from ...placement.errors import InvalidRequest
from ..model.numeric import parked_reason
from .draft_profile import Profile
from .drafter import DraftModel
from .options import EngineOptions
from .request import EngineRequest

log = logging.getLogger(__name__)


class Drafting:
    """The draft head of one engine, if it has one."""

    def __init__(
        self,
        head: DraftHead | None,
        family: Family | None,
        vocabulary: int,
        options: EngineOptions,
        profile: Profile,
    ) -> None:
        """`family` None: the model gives no hidden states, or not all of it is here."""
        self._head = head
        self._family = family
        self._profile = profile
        # A card may name more ids than this checkpoint has: then all of them are drafted.
        drafted = options.draft_vocabulary
        self._vocabulary = drafted if drafted < vocabulary else 0
        self.max_k = options.max_draft_tokens if head is not None else 0
        self.off = ""
        """Why the draft head was loaded and is not used all the same."""
        self.parked = ""
        """Why it is not used any more: an answer found its logits not to be finite."""

    def turn_off(self, why: str) -> None:
        self.off, self.max_k = why, 0

    def park(self, position: int | None) -> None:
        """An answer drafted no more from there on; None: it found nothing wrong."""
        if position is not None and not self.parked:
            self.parked = parked_reason(position)
            log.warning("%s", self.parked)

    def check(self, k: int) -> None:
        """Raises InvalidRequest."""
        if not 0 <= k <= self.max_k:
            raise InvalidRequest(
                f"num_draft_tokens {k} is not in this runner's range of 0 to {self.max_k}",
                param="num_draft_tokens",
            )

    def granted(self, request: EngineRequest) -> EngineRequest:
        """The request without drafts where the head is parked."""
        if not request.k or not self.parked:
            return request
        return replace(request, k=0, adaptive=False, drafting_reason=self.parked)

    def depth(self, request: EngineRequest) -> DepthPolicy:
        """How many tokens each of its rounds drafts."""
        if not request.adaptive or request.k == 0:
            return FixedDepth(request.k)
        return AdaptiveDepth(request.k, request.k, self._profile.prior, self._profile.costs)

    def model(self) -> DraftModel | None:
        """What drafts; None without a head."""
        if self._head is None or self._family is None:
            return None
        logits = draft_logits(self._family, self._head, self._vocabulary)
        return DraftModel(self._head, self._family.embed, logits)
