"""Measures a loaded model in pieces; a profile keeps the results for its next load."""

from collections.abc import Sequence

from ....mtp.batch_probe import SIZES, batch_identity, rows_to_probe, same_prompts
from ....mtp.caches.batch_caches import can_batch
from ....mtp.drafting.costs import interpolated
from ....mtp.lookup_probe import measure_batch, measure_copies
from ....mtp.part_probe import differing_part
from ....mtp.pieces import Pieces
from ....mtp.probe import (
    LONGEST_PROBED,
    PROMPT_ROWS,
    Subject,
    exact_depth,
    exact_widths,
    measure_costs,
)
from ....mtp.types import MAX_ROUND_ROWS
from ...kernels.row_products import name_of
from ..options import EngineOptions
from .draft_profile import DraftProfile, MeasuredCopies, MeasuredIdentity, MeasuredSharedCopies

REPEATS = 3
"""Measurements of each cost; their median counts."""
SHARED_DEPTHS = (3, 1)
"""Drafts that are tried in shared rounds where the most are not exact."""


def sizes_of(length: int, most: int, rows: int = MAX_ROUND_ROWS) -> tuple[int, ...]:
    """The requests that are measured together with copies of `length` tokens: few, and as many as
    may share a round of `rows` rows, `most` at most. None if no two may."""
    largest = min(most, rows // (length + 1))
    return tuple(sorted({min(3, largest), largest})) if largest > 1 else ()


def batching_refusal(options: EngineOptions, caches: Sequence[object]) -> str:
    """Why requests share no forwards; empty where they may. `caches`: one request's, by layer."""
    if not options.batching:
        return "EXO_BATCHING_ENABLED is 0"
    if unbatchable := {type(cache).__name__ for cache in caches if not can_batch([cache])}:
        kinds = ", ".join(sorted(unbatchable))
        return f"this model's caches ({kinds}) are not computed in batches"
    return ""


def probe_identity(subject: Subject, k: int, profile: DraftProfile) -> Pieces[MeasuredIdentity]:
    """How many of `k` drafts are exact, measured once for each profile.

    If the profile has it, there are no pieces. A profile's key names all that decides the result:
    device, checkpoint, dtype, versions, kernels.
    """
    context = min(subject.context_length, LONGEST_PROBED)
    if (measured := profile.identity) is None or not measured.is_of(k, context):
        depth = yield from exact_depth(subject, k)
        part = "" if depth == k else (yield from part_of(subject, depth + 2))
        measured = profile.identity = MeasuredIdentity.of(depth or None, k, context, part)
    return measured


def part_of(subject: Subject, rows: int) -> Pieces[str]:
    """The first part of the target that differs in a block of `rows` rows, in words; "": none."""
    if (part := (yield from differing_part(subject, rows))) is None:
        return ""
    name = name_of(part.module, part.dtype)
    return f" ({rows} rows after {part.context} first differ in: {name})"[:300]


def probe_batch_identity(
    subject: Subject, k: int, profile: DraftProfile
) -> Pieces[MeasuredIdentity]:
    """The same of requests that share rounds: of `k` drafts, or of one of SHARED_DEPTHS."""
    context, rows = min(subject.context_length, LONGEST_PROBED), rows_to_probe(subject)
    if (measured := profile.batch_identity) is None or not measured.is_of(k, context, rows):
        depth, depths = None, [k, *(depth for depth in SHARED_DEPTHS if depth < k)]
        while depths and depth is None:
            tried = depths.pop(0)
            value = yield from batch_identity(subject, tried, most_rows=rows)
            depth = tried if value == "bitwise" else None
        measured = MeasuredIdentity.of(depth, k, context, rows=rows)
        profile.batch_identity = measured
    return measured


def probe_prompts(subject: Subject, profile: DraftProfile) -> Pieces[bool]:
    """Whether prompts that one forward reads have the bits of prompts alone, once a profile."""
    if profile.shares_prompts is None:
        profile.shares_prompts = yield from same_prompts(subject)
    return profile.shares_prompts


def probe_copies(
    subject: Subject, lengths: Sequence[int], profile: DraftProfile
) -> Pieces[MeasuredCopies]:
    """Measures which `lengths` of copied drafts are exact, and their costs, once a profile."""
    measured, context = profile.copies, min(subject.context_length, LONGEST_PROBED)
    widths = [length + 1 for length in lengths]
    if measured is not None and (measured.lengths, measured.context_length) == (
        tuple(lengths),
        context,
    ):
        return measured
    exact = yield from exact_widths(subject, widths)
    part = "" if exact else (yield from part_of(subject, widths[0]))
    seconds = yield from measure_copies(subject, lengths, REPEATS)
    profile.copies = MeasuredCopies(
        lengths=tuple(lengths),
        exact=tuple(width - 1 for width in exact),
        context_length=context,
        verify=tuple(seconds.verify.values()),
        rollback=tuple(seconds.rollback.values()),
        part=part,
    )
    return profile.copies


def probe_shared_copies(
    subject: Subject, lengths: Sequence[int], profile: DraftProfile
) -> Pieces[MeasuredSharedCopies]:
    """Measures which `lengths` are exact in batches as well, and what their rounds cost, once for
    each profile. `lengths`: exact ones of a request that is alone."""
    context, rows = min(subject.context_length, LONGEST_PROBED), rows_to_probe(subject)
    if (measured := profile.shared_copies) is not None and measured.is_of(lengths, context, rows):
        return measured
    sizes = {length: sizes_of(length, SIZES[-1], rows) for length in lengths}
    exact = list[int]()
    for length in lengths:
        if not sizes[length]:
            continue
        if (yield from batch_identity(subject, length, sizes[length])) == "bitwise":
            exact.append(length)
    ratios = list[tuple[int, int, float]]()
    for size in sorted({size for length in exact for size in sizes[length]}):
        of_size = [length for length in exact if size in sizes[length]]
        measures = yield from measure_batch(subject, size, of_size, REPEATS)
        ratios += [(size, length, ratio) for length, ratio in measures.items()]
    profile.shared_copies = MeasuredSharedCopies(
        lengths=tuple(lengths),
        exact=tuple(exact),
        context_length=context,
        ratios=tuple(ratios),
        rows=rows,
    )
    return profile.shared_copies


def probe_costs(subject: Subject, k: int, profile: DraftProfile) -> Pieces[None]:
    """Measures the seconds of rounds of up to `k` drafts, unless the profile has them; of more than
    three, some depths, between which the others lie."""
    if len(profile.costs.probed) > k:
        return
    ids = [(11 * i + 5) % subject.vocabulary for i in range(PROMPT_ROWS)]
    depths = [*range(1, k + 1)] if k <= 3 else [1, 2, 4, *([k] if k > 4 else [])]
    costs = yield from measure_costs(subject, ids, depths, REPEATS)
    seconds = [a + b for a, b in zip(costs.verify, (0.0, *costs.draft), strict=True)]
    profile.costs.probe(interpolated(dict(zip((0, *depths), seconds, strict=True))))
