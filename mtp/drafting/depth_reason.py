"""Why rounds draft as many tokens as they do, for a person. Pure."""

from ..types import MAX_ROUND_ROWS
from .round_policy import DraftDemand, Offer, RoundChoice, RoundPolicy


def depth_reason(policy: RoundPolicy, demand: DraftDemand, choice: RoundChoice | None) -> str:
    """Why the last round of an answer drafted as many tokens as it did.

    `policy`: the one of all requests. `choice`: that round, or None before the first.
    """
    if demand.acceptance is None:
        return _of_fixed(policy, demand)
    k, most, size = min(demand.initial, demand.most), demand.most, 1
    offers, position = [Offer(demand, most)], 0
    if choice is not None:
        k, position, size = choice.k, choice.position, len(choice.offers)
    if choice is not None and size > 1:
        offers, most = choice.offers, max(offer.limit for offer in choice.offers)
    source = (demand.policy if size == 1 else None) or policy
    subject = f"K = {k} of at most {most}" if size == 1 else f"K = {k} for {size} requests together"
    if size == 1 and source.trial_k(1) == k:
        subject = f"K = {k} is being tried"
    rates, speeds = source.rates(offers, position, most), list[str]()
    while (rate := rates.get(len(speeds))) is not None:
        speeds.append(f"{rate / rates[0]:.2f}")
    if len(speeds) < 2 or (size == 1 and not (demand.is_known and len(speeds) > most)):
        unknown = f"K = {k}, {demand.source}" if size == 1 else subject
        return f"{unknown}, until enough is measured to choose by speed"
    listed = f"expected speeds {', '.join(speeds)} times plain decoding"
    return f"{subject}: {listed} for K = 0 to {len(speeds) - 1}"


def _of_fixed(policy: RoundPolicy, demand: DraftDemand) -> str:
    """The same of an answer with a K of its own, which rounds that many requests share lower."""
    shared = policy.most_drafts(demand.sharers)
    if shared >= demand.most:
        return f"K = {demand.most} in every round: {demand.source}"
    is_full = shared < policy.shared_depth
    why = f"have {MAX_ROUND_ROWS} rows at most" if is_full else "are not exact with more"
    rounds = f"rounds that {demand.sharers} requests shared, which {why}"
    return f"K = {shared} in {rounds}, else up to {demand.most}: {demand.source}"
