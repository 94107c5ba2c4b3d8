"""Measurements of a first stage: exactness, and the costs of rounds.

Each is used from the request after it on. What a request may use is decided when it begins, so
that a measurement which ends meanwhile changes none of its tokens.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlx import nn

from ....mtp.batch_probe import warm_up_batches
from ....mtp.pieces import Pieces, result_of
from ....mtp.probe import Costs, Subject, measure_costs, warm_up
from ....mtp.targets import Target
from ...kernels.cuda import available
from ...kernels.first_choices import choose_first
from ...model.open_model import MODEL_FAULTS, headline
from ...model.tensors import DTYPES
from ..attempts import Attempts
from ..drafter import new_draft
from ..measuring import NOT_MEASURED, Measuring, repeated
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
    probe_identity,
    probe_prompts,
)

log = logging.getLogger(__name__)


def nothing_refused(_: str) -> None:
    """The measurement only saves time to later answers."""


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
        has_room: Callable[[int], bool] = lambda _: True,
        modules: Sequence[nn.Module] = (),
        row_bytes: int = 0,
        read_images: Callable[[], Pieces[None]] | None = None,
    ) -> None:
        """`forms`: those of the engine's rounds; of a split model, this stage's rounds.

        `make_caches`: makes the caches of one request. `profile`: keeps what was measured.
        `has_room`: see `Measuring`. `modules`: the model's own. `row_bytes`: see
        `row_state_bytes`. `read_images`: reads the first images, where the model has a tower.
        """
        self.identity = "off"
        """The greedy identity of drafts; "off" without a draft head, or until it is measured."""
        self.batch_identity = "off"
        """"off" where no requests are decoded together, or until it is measured."""
        self.shares_prompts = False
        """Whether one forward of several prompts was measured to change no bit."""
        self.batching_reason = batching_refusal(options, make_caches())
        """Why no requests share forwards; empty where they may."""
        self._forms = forms
        self._options = options
        self._has_room = has_room
        self._read_images = read_images
        self._drafting = drafting
        self._lookup = lookup
        self.profile = profile

        self._clock = clock
        self._measuring: Measuring | None = None
        model = drafting.model
        make_drafter = None if model is None else partial(new_draft, model)
        context = options.context_length
        self.subject = Subject(
            target, make_caches, vocabulary, context, clock, make_drafter, modules, row_bytes
        )

    def begin(self) -> Measuring:
        """Takes up what the profile has of both identities, of copies and of the costs of rounds
        for the largest K. What it lacks is refused to requests until `step` has measured it.
        """
        if self._drafting.max_k:
            self._drafting.off_reason = NOT_MEASURED
        if not self.batching_reason:
            self.batching_reason = NOT_MEASURED
        positions = self.subject.target.rope_positions
        self._measuring = Measuring(
            self._pieces, self._clock, lambda: positions.set_deltas([0]), self._has_room
        )
        return self._measuring

    def step(self, *, idle: bool) -> bool:
        """See `Measuring.step`."""
        return self._measuring is not None and self._measuring.step(idle=idle)

    def measure(self) -> None:
        """Measures at once what the profile lacks."""
        self.begin().finish()

    def _pieces(self) -> Pieces[None]:
        guard = Attempts(self.profile.path).guard
        parts = [
            guard("drafts", self._measure_drafts(), self._refuse_head),
            guard("batches", self._measure_batches(), self._refuse_batches),
        ]
        if isinstance(self._forms, RoundForms) and self._forms.counts_on_device:
            parts.reverse()  # drafts would need a batch's caches
        for part in parts:
            yield from part
        k = self._drafting.depth
        copies = self._lookup.probe(self.subject, self.profile)
        yield from guard("copies", copies, self._lookup.refuse)
        yield from guard("costs", self._measure_costs(k), self._refuse_head)
        if isinstance(self._forms, RoundForms):
            copies = self._measure_shared_copies(k)
            yield from guard("shared-copies", copies, self._lookup.refuse_shared)
        ways = choose_first(self.subject.vocabulary, k, DTYPES[self._options.dtype])
        yield from guard("sampling", ways, nothing_refused)
        if isinstance(self._forms, RoundForms):  # it is the whole model
            widths = {*range(1, k + 2)}
            if available():  # each number of rows has a trace of its own
                widths |= {length + 1 for length in self._lookup.policy.lengths}
            first_rounds = warm_up(self.subject, sorted(widths))
            yield from guard("first-rounds", first_rounds, nothing_refused)
        if available() and self.subject.row_bytes and not self.batching_reason:
            policy = self._lookup.policy
            depth, rows = min(k, policy.shared_depth), policy.probed_rows
            first_batches = warm_up_batches(self.subject, depth, rows)
            yield from guard("first-batches", first_batches, nothing_refused)
        if available() and self._read_images is not None:
            yield from guard("first-images", self._read_images(), nothing_refused)

    def costs(self, prompt: Sequence[int], k: int, repeats: int) -> Costs:
        """Seconds of verifies and of up to `k` drafts after `prompt`; see `mtp.probe`."""
        return result_of(measure_costs(self.subject, prompt, range(1, k + 1), repeats))

    def _measure_drafts(self) -> Pieces[None]:
        if not (k := self._drafting.max_k):
            return
        reason = ""
        try:
            measured = yield from repeated(lambda: probe_identity(self.subject, k, self.profile))
            self.identity = measured.value
            self._drafting.limit(measured.depth, measured.part)
        except MODEL_FAULTS as fault:  # only the probe's own state is lost
            reason = f"drafts cannot be measured here ({headline(fault)})"
            log.warning("%s: nothing is drafted", reason)
        self._drafting.is_near_tie = self._lookup.is_near_tie = self.identity == "near_tie"
        self._drafting.off_reason = ""
        if self._drafting.is_near_tie and self.profile.identity is not None:
            self._lookup.part = self.profile.identity.part
            log.info("drafts may decide near ties otherwise than single steps%s", self._lookup.part)
        if reason:
            self._refuse_head(reason)
        self.profile.save(at_once=True)

    def _refuse_head(self, reason: str) -> None:
        if self._drafting.max_k:
            self._drafting.off_reason = reason

    def _refuse_batches(self, reason: str) -> None:
        if isinstance(self._forms, RoundForms):
            self._forms.counts_on_device = False  # by a batch's caches
        self.batching_reason = reason

    def _measure_shared_copies(self, k: int) -> Pieces[None]:
        if not self.batching_reason:
            is_exact = self.identity == self.batch_identity == "bitwise"
            head = min(k, self._lookup.policy.shared_depth) if is_exact else 0
            yield from self._lookup.probe_shared(
                self.subject, self.batch_identity, head, self.profile
            )
        self.profile.save(at_once=True)

    def _measure_costs(self, k: int) -> Pieces[None]:
        """The first run of the draft head: one that fails would fail in answers as well."""
        if not k or self._drafting.off_reason:
            return
        try:
            for kind, model in self._drafting.models.items():
                subject = replace(self.subject, make_drafter=partial(new_draft, model))
                profile = self._drafting.profiles[kind]
                yield from repeated(partial(probe_costs, subject, k, profile))
                profile.save(at_once=True)
        except MODEL_FAULTS as fault:  # only the probe's own state is lost
            self._drafting.off_reason = f"this model's head cannot draft here ({headline(fault)})"
            log.warning("%s: nothing is drafted", self._drafting.off_reason)

    def _measure_batches(self) -> Pieces[None]:
        if self.batching_reason != NOT_MEASURED:
            return
        reason = ""
        try:
            match self._forms:
                case RoundForms():
                    k = self._drafting.depth
                    measured = yield from repeated(
                        lambda: probe_batch_identity(self.subject, k, self.profile)
                    )
                    self.batch_identity = measured.value
                    self._lookup.policy.shared_depth = measured.depth
                    self._lookup.policy.probed_rows = measured.rows
                    self.shares_prompts = yield from repeated(
                        lambda: probe_prompts(self.subject, self.profile)
                    )
                case StageRounds() as rounds:
                    context = self._options.context_length
                    yield from rounds.probe(0, self.subject.vocabulary, context)
                    reason = rounds.batching_reason
        except MODEL_FAULTS as fault:
            reason = f"this model cannot be computed in batches ({headline(fault)})"
            log.warning("%s: its requests take turns", reason)
        self.batching_reason = ""
        if reason:
            self._refuse_batches(reason)
        self.profile.save(at_once=True)
