"""Measurements of a first stage before its first request: exactness, and the costs of rounds."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ....mtp.probe import Costs, Subject, measure_costs
from ....mtp.targets import Target
from ...kernels.first_choices import choose_first
from ...model.open_model import MODEL_FAULTS, headline
from ...model.tensors import DTYPES
from ..drafter import new_draft
from ..options import EngineOptions
from ..request import Request
from ..round_forms import RoundForms
from ..stage_rounds import StageRounds
from .draft_profile import DraftProfile
from .drafting import DraftControl
from .lookup_control import LookupControl
from .probing import (
    batching_refusal,
    probe_batch_identity,
    probe_costs,
    probe_fixed_rows,
    probe_identity,
)

log = logging.getLogger(__name__)


class ModelMeasurements:
    """Whether drafts and batches change answers on this machine, and what rounds cost."""

    def __init__(
        self,
        forms: RoundForms | StageRounds[Request],
        target: Target,
        make_caches: Callable[[], list[Any]],
        options: EngineOptions,
        drafting: DraftControl,
        lookup: LookupControl,
        profile: DraftProfile,
        vocabulary: int,
        clock: Callable[[], float],
        *,
        shares_prompts: bool = True,
    ) -> None:
        """`forms`: those of the engine's rounds; of a split model, this stage's rounds.

        `make_caches`: makes the caches of one request. `profile`: keeps what was measured.
        `shares_prompts`: whether prompts may be read in one forward.
        """
        self.identity = "off"
        """The greedy identity of drafts; "off" without a draft head."""
        self.batch_identity = "off"
        """"off" where no requests are decoded together."""
        self.batching_reason = batching_refusal(options, make_caches())
        """Why no requests share forwards; empty where they may."""
        self._forms = forms
        self._options = options
        self._shares_prompts = shares_prompts
        self._drafting = drafting
        self._lookup = lookup
        self.profile = profile

        model = drafting.model()
        make_drafter = None if model is None else partial(new_draft, model)
        context = options.context_length
        self._on_trial: Callable[[], None] = lambda: None

        def caches() -> list[Any]:
            self._on_trial()
            return make_caches()

        self.subject = Subject(target, caches, vocabulary, context, clock, make_drafter)

    @property
    def fixed_rows(self) -> int:
        """Rows of each decode forward in strict mode, or 0 if rows are not padded."""
        return self._forms.fixed_rows if isinstance(self._forms, RoundForms) else 0

    @property
    def drafts_are_exact(self) -> bool:
        """Whether a verify of drafts has the bits of single steps. Strict mode has forwards of one
        size, which `identity` does not cover."""
        return self.identity == "bitwise" and not self.fixed_rows

    def measure(self, on_trial: Callable[[], None] = lambda: None) -> None:
        """Measures both identities and the costs of rounds for the largest K, or reads them from
        the profile; compiles the kernels that answers use. `on_trial` is called before each trial.
        """
        self._on_trial = on_trial
        k, vocabulary = self._drafting.max_k, self.subject.vocabulary
        choose_first(vocabulary, k, DTYPES[self._options.dtype])
        if not self.batching_reason:
            match self._forms:
                case RoundForms() as forms:
                    self._measure_batch(forms, k)
                case StageRounds() as rounds:
                    rounds.probe(0, vocabulary, self._options.context_length)
                    self.batching_reason = rounds.batching_reason
        self._lookup.probe(self.subject, self.profile)
        if k:
            self._measure_drafts(k)
        if not self.batching_reason:
            is_exact = self.identity == self.batch_identity == "bitwise"
            self._lookup.probe_shared(
                self.subject, self.batch_identity, k if is_exact else 0, self.profile
            )
        self.profile.save(at_once=True)

    def costs(self, prompt: Sequence[int], k: int, repeats: int) -> Costs:
        """Seconds of verifies and of up to `k` drafts after `prompt`; see `mtp.probe`."""
        return measure_costs(self.subject, prompt, k, repeats)

    def _measure_drafts(self, k: int) -> None:
        rows = self.fixed_rows
        if rows:
            if reason := probe_fixed_rows(self.subject, rows):
                self._drafting.turn_off(reason)
                assert isinstance(self._forms, RoundForms)
                self._forms.fixed_rows = 0
                return
            self.identity = "bitwise"
        else:
            self.identity = probe_identity(self.subject, k, self.profile)
        probe_costs(self.subject, k, rows, self.profile)

    def _measure_batch(self, forms: RoundForms, k: int) -> None:
        try:
            self.batch_identity = probe_batch_identity(
                self.subject, k, self.profile, shares_prompts=self._shares_prompts
            )
        except MODEL_FAULTS as fault:  # only the probe's own state is lost
            self.batching_reason = f"this model cannot be computed in batches ({headline(fault)})"
            log.warning("%s: its requests take turns", self.batching_reason)
            forms.counts_on_device = False  # by a batch's caches
            return
        self.profile.save(at_once=True)
