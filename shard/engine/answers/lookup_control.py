"""Whether a request copies drafts from its own tokens, in which lengths, and why not."""

import logging
from collections.abc import Sequence
from typing import Final

from mlx import nn

from ....mtp.caches.rollback import fixed_kinds
from ....mtp.drafting.acceptance import CopyEvidence
from ....mtp.drafting.lookup_drafts import PromptLookup
from ....mtp.drafting.round_policy import RoundPolicy
from ....mtp.pieces import Pieces
from ....mtp.probe import Subject
from ...model.open_model import MODEL_FAULTS, headline
from ...pipeline.copy_query import ExactCopies
from ..measuring import NOT_MEASURED, repeated
from ..options import EngineOptions
from ..request import Parameters
from ..stage_copies import lengths_of
from .draft_profile import DraftProfile
from .probing import probe_copies, probe_shared_copies

log = logging.getLogger(__name__)

NOT_EXACT_TOGETHER: Final = (
    "it shared its steps, and on this machine a verify in a batch does not compute what single "
    "steps do, so copied drafts could change an answer"
)
NOT_ALONE: Final = (
    "it ran beside other answers, and over several nodes only an answer that is alone copies drafts"
)
NOT_ASKED: Final = "the request sets num_draft_tokens, so only the model's own head drafts"
NEAR_TIES: Final = (
    "where a verify may decide near ties otherwise than single steps{}, what it drafts must not "
    "follow the clock, by which copies are chosen; EXO_NATIVE_MTP_ENABLED=0 allows them"
)


class LookupControl:
    """Grants prompt lookup to the requests of one engine, if its rows were measured to be exact."""

    def __init__(
        self,
        options: EngineOptions,
        model: nn.Module,
        caches: Sequence[object],
        policy: RoundPolicy,
        *,
        is_whole: bool,
    ) -> None:
        """`caches`: of one request, by layer. `is_whole`: whether this node has the whole model."""
        self.off_reason = _objection(options, caches)
        """Why no request copies; empty if some may."""
        self.is_near_tie = False
        """Whether drafts of the head may decide near ties otherwise than single steps do."""
        self.part = ""
        """The part that computes other bits for blocks than for single steps, in words."""
        self.policy = policy
        alone = NOT_MEASURED if is_whole else NOT_ALONE
        self.shared_reason = "" if self.off_reason else alone
        """Why requests copy nothing while they share forwards; empty if they may."""
        self.exact = ExactCopies.none(NOT_MEASURED)
        """The copies that the layers here compute exactly."""
        self._candidates = lengths_of(model, None if is_whole else options.prefill_chunk)
        self._evidence = CopyEvidence()

    def probe(self, subject: Subject, profile: DraftProfile) -> Pieces[None]:
        """Measures which lengths are exact and what they cost, or reads it from the profile."""
        if self.off_reason:
            return
        try:
            copies = yield from repeated(lambda: probe_copies(subject, self._candidates, profile))
        except MODEL_FAULTS as fault:  # only the probe's own state is lost
            self.off_reason = f"this model cannot verify copied drafts ({headline(fault)})"
            log.warning("%s: prompt lookup is off", self.off_reason)
            return
        plain, *verify = copies.verify
        ratios = {n: s / plain for n, s in zip(copies.lengths, verify, strict=True)}
        removal = {n: s / plain for n, s in zip(copies.lengths, copies.rollback, strict=True)}
        self.policy.allow(copies.exact, ratios, removal)
        self.exact = ExactCopies.measured(
            copies.lengths, copies.exact, copies.verify, copies.rollback
        )
        if not copies.exact:
            self.off_reason = (
                f"a verify of {copies.lengths[0] + 1} rows or more does not compute what single "
                f"steps do on this machine{copies.part}, so copied drafts could change an answer; "
                "`exo-node verify` shows by how much"
            )
            log.info("prompt lookup is off: %s", self.off_reason)

    def probe_shared(
        self, subject: Subject, identity: str, head: int, profile: DraftProfile
    ) -> Pieces[None]:
        """The same for batches, called after `probe`. `identity`: whether batches are exact.

        `head`: drafts of the head up to which each row of a batch is exact as well.
        """
        if self.off_reason:
            return
        if identity != "bitwise":
            self.shared_reason = NOT_EXACT_TOGETHER
            return
        try:
            copies = yield from repeated(
                lambda: probe_shared_copies(subject, self.policy.lengths, profile)
            )
        except MODEL_FAULTS as fault:  # only the probe's own state is lost
            self.shared_reason = f"batches cannot verify copied drafts ({headline(fault)})"
            log.warning("%s: requests that share steps do not copy", self.shared_reason)
            return
        ratios = {(size, length): ratio for size, length, ratio in copies.ratios}
        self.shared_reason = "" if copies.exact else NOT_EXACT_TOGETHER
        self.policy.probed_rows = min(self.policy.probed_rows, copies.rows)
        if copies.exact:
            self.policy.allow_shared(copies.exact, ratios, head)

    def refuse(self, reason: str) -> None:
        """Lets no request copy."""
        self.off_reason = self.off_reason or reason

    def refuse_shared(self, reason: str) -> None:
        """Lets requests copy only alone."""
        if not self.off_reason:
            self.shared_reason = reason

    def reason(self, request: Parameters, *, began: bool = True, shared: bool = False) -> str:
        """Why a request copies nothing; empty if it may. `began`: whether it could when it began.
        `shared`: in steps that others shared."""
        if not request.drafting.prompt_lookup:
            return NOT_ASKED
        if self.is_near_tie and request.k and not self.off_reason:
            return NEAR_TIES.format(self.part)
        reason = self.refusal or (self.shared_reason if shared else "")
        return reason if began else reason or NOT_MEASURED

    @property
    def refusal(self) -> str:
        """Why no request copies; empty if some may."""
        return self.off_reason or ("" if self.policy.lengths else NOT_MEASURED)

    def lookup(self, request: Parameters) -> PromptLookup | None:
        """The copies of one request; None if it copies nothing."""
        if self.reason(request):
            return None
        evidence = self._evidence.of_answer(self.policy.lengths[-1])
        return PromptLookup(request.prompt, evidence)


def _objection(options: EngineOptions, caches: Sequence[object]) -> str:
    if not options.prompt_lookup:
        return options.lookup_off_reason or "the placement was loaded without it"
    if kinds := fixed_kinds(caches):
        return (
            f"rows cannot be taken back from this model's caches ({', '.join(kinds)}), so drafts "
            "cannot be verified"
        )
    return ""
