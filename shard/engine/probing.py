"""What is measured of a model before its first request, and remembered for its next load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...mtp.batch_probe import batch_identity
from ...mtp.batch_prompts import BatchTarget, PromptTarget
from ...mtp.costs import RoundCosts
from ...mtp.probe import (
    LONGEST_PROBED,
    PROMPT_ROWS,
    Costs,
    Draft,
    Forward,
    fixed_rows_identity,
    greedy_identity,
    measure_costs,
    warm_up,
)
from .draft_profile import MeasuredIdentity, Profile

REPEATS = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured."""

    forward: Forward
    batch_target: BatchTarget
    make_caches: Callable[[], list[Any]]
    make_drafter: Callable[[], Draft]
    vocabulary: int
    context_length: int
    clock: Callable[[], float]
    prompts: PromptTarget | None = None
    """Where prompts are read together."""

    def costs(self, prompt: Sequence[int], k: int, repeats: int) -> Costs:
        """What verifies and drafts up to `k` cost; see `mtp.probe`."""
        return measure_costs(
            self.forward,
            self.make_caches,
            self.make_drafter,
            prompt,
            k,
            repeats,
            self.clock,
        )


def probe_identity(subject: Subject, k: int, profile: Profile) -> str:
    """`greedy_identity` for up to `k` drafts, measured once for each profile.

    Where it is known only the kernels are warmed up. A profile names all that decides the number:
    device, checkpoint, dtype, versions, kernels.
    """
    forward, caches = subject.forward, subject.make_caches
    known, context = profile.identity, min(subject.context_length, LONGEST_PROBED)
    if known is not None and (known.k, known.context_length) == (k, context):
        warm_up(forward, caches, subject.vocabulary, k)
        return known.value
    value = greedy_identity(forward, caches, subject.vocabulary, k, context)
    profile.identity = MeasuredIdentity(value=value, k=k, context_length=context)
    return value


def probe_batch_identity(subject: Subject, k: int, profile: Profile) -> str:
    """`batch_identity` for up to `k` drafts, measured once for each profile."""
    known, context = profile.batch_identity, min(subject.context_length, LONGEST_PROBED)
    if known is not None and (known.k, known.context_length) == (k, context):
        return known.value
    value = batch_identity(
        subject.forward,
        subject.batch_target,
        subject.make_caches,
        subject.vocabulary,
        k,
        context,
        subject.prompts,
    )
    profile.batch_identity = MeasuredIdentity(value=value, k=k, context_length=context)
    return value


def probe_fixed_rows(subject: Subject, rows: int) -> str:
    """Why drafts must stay off in strict mode with `rows` rows in each forward; "" where it is
    exact. Measured at each load: strict mode is asked for by those who want it seen."""
    check = fixed_rows_identity(subject.forward, subject.make_caches, subject.vocabulary, rows)
    return "" if check.holds else check.reason


def probe_costs(subject: Subject, k: int, fixed_rows: int, profile: Profile) -> None:
    """Measures what rounds cost, where no profile tells."""
    if profile.costs.probed:
        return
    ids = [(11 * i + 5) % subject.vocabulary for i in range(PROMPT_ROWS)]
    costs = subject.costs(ids, k, REPEATS)
    # In strict mode a plain step has as many rows as the largest verify.
    verify = [costs.verify[-1]] * len(costs.verify) if fixed_rows else costs.verify
    rounds = [a + b for a, b in zip(verify, (0.0, *costs.draft), strict=True)]
    profile.costs = RoundCosts(rounds)
