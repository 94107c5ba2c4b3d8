"""Why rounds draft as many tokens as they do, for a person. Pure."""

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
    room = _room(policy, size)
    if room and not most:
        return f"{subject}: {room}"
    if len(speeds) < 2 or (size == 1 and not (demand.is_known and len(speeds) > most)):
        unknown = f"K = {k}, {demand.source}" if size == 1 else subject
        return f"{unknown}, until enough is measured to choose by speed"
    listed = f"expected speeds {', '.join(speeds)} times plain decoding"
    return "; ".join(filter(None, (f"{subject}: {listed} for K = 0 to {len(speeds) - 1}", room)))


def _room(policy: RoundPolicy, size: int) -> str:
    """That memory limits the drafts of a round of `size` requests; empty if it does not."""
    if size == 1 or policy.room_rows >= min(policy.probed_rows, (policy.shared_depth + 1) * size):
        return ""
    return f"there is memory for the states of {policy.room_rows} rows in all"


def _of_fixed(policy: RoundPolicy, demand: DraftDemand) -> str:
    """The same of an answer with a K of its own, which rounds that many requests share lower."""
    shared = policy.most_drafts(demand.sharers)
    if shared >= demand.most:
        return f"K = {demand.most} in every round: {demand.source}"
    is_full = shared < policy.shared_depth
    why = f"have {policy.most_rows(2)} rows at most" if is_full else "are not exact with more"
    rounds = f"rounds that {demand.sharers} requests shared, which {why}"
    reason = f"K = {shared} in {rounds}, else up to {demand.most}: {demand.source}"
    return "; ".join(filter(None, (reason, _room(policy, demand.sharers))))
