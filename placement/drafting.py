"""Whether a request drafts with the model's own MTP head or a drafter, and in a person's words why
not."""

from dataclasses import dataclass
from typing import Final, Literal

from .card import DraftDepth, ModelCard
from .errors import InvalidRequest
from .ids import ModelId

DraftPolicy = Literal["fixed", "adaptive"]

GENERATES_NOTHING: Final = "an embedder generates nothing"
"""Why an embedder never drafts."""
NATIVE: Final = "native MTP"


@dataclass(frozen=True, slots=True)
class HeadState:
    """Whether the generator has loaded the weights of what drafts."""

    loaded: bool
    reason: str = ""
    """Why not, with the remedy, as the runner reports it."""


@dataclass(frozen=True, slots=True)
class EnabledState:
    """The operator's switch, and where it was set."""

    enabled: bool
    source: str = "the default"
    """`EXO_NATIVE_MTP_ENABLED=0`, or a place: `the settings page`."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """One request's drafter."""

    kind: Literal["none", "native_mtp", "block_drafter"]
    k: int
    """Drafts a round, at most where `adaptive`; 0 exactly when `kind` is none."""
    reason: str
    """Why not, with the remedy; where the head drafts, the source of `initial_k`."""
    adaptive: bool = False
    """Whether the generator chooses the depth, from 0 to `k`, by measured costs and acceptance."""
    initial_k: int = 0
    """Drafts a round until depths can be compared."""


def choose_drafting(
    card: ModelCard,
    num_stages: int,
    head: HeadState,
    enabled: EnabledState,
    requested_k: int | None,
    policy: DraftPolicy | None = None,
    *,
    adaptive: bool = False,
    default_k: int = 0,
) -> Drafting:
    """The drafter of one request; `requested_k` is its `num_draft_tokens`, None where it has none.

    `policy` is the request's own. Without one a request that names its K gets just that K. One
    that does not begins with `initial_depth`, and goes up to the card's max_k where the node adapts
    it (`adaptive`). `default_k`: the node's own default, or 0. Every "no" carries its reason.
    Raises InvalidRequest for a K below 0 or above the card's max_k;
    a K for a model that cannot draft is no error: its reason goes into the answer's stats.
    """
    if requested_k is not None and requested_k < 0:
        raise _refused(f"num_draft_tokens is {requested_k}; ask for 0 (off) or more")
    mtp = card.drafts
    if card.embeds:
        return _none(GENERATES_NOTHING)
    if mtp is None:
        unheeded = f"\n(num_draft_tokens = {requested_k} had no effect)" if requested_k else ""
        return _none(undeclared_reason(card.id) + unheeded)
    if requested_k is not None and requested_k > mtp.max_k:
        raise _refused(
            f"num_draft_tokens is {requested_k}, and {card.id} drafts at most {mtp.max_k} tokens "
            f"a round; ask for 0 (off) to {mtp.max_k}"
        )
    no = _objection(card, mtp, num_stages, head, enabled, requested_k)
    if no:
        return _none(no)
    if policy is None:
        policy = "adaptive" if adaptive and requested_k is None else "fixed"
    initial_k, reason = initial_depth(mtp, default_k)
    kind = "block_drafter" if card.drafter else "native_mtp"
    if policy == "adaptive":
        k = mtp.max_k if requested_k is None else requested_k
        return Drafting(kind, k, reason, adaptive=True, initial_k=min(initial_k, k))
    if requested_k is not None:
        initial_k, reason = requested_k, "the request's num_draft_tokens"
    return Drafting(kind, initial_k, reason, initial_k=initial_k)


def initial_depth(mtp: DraftDepth, default_k: int = 0) -> tuple[int, str]:
    """Drafts a round of a request that names no K until depths can be compared, and its source.

    `default_k`: EXO_NATIVE_MTP_DEFAULT_K of the generator's node, or 0.
    """
    if not default_k:
        return mtp.default_k, "the model's default"
    setting = f"EXO_NATIVE_MTP_DEFAULT_K={default_k}"
    if default_k > mtp.max_k:
        return mtp.max_k, f"{setting}, limited to the model's max_k"
    return default_k, setting


def undeclared_reason(model: ModelId) -> str:
    """Why a model without [native_mtp] never drafts: a whole head in its files would be found."""
    return (
        f"the card of {model} does not declare native MTP, and no MTP head was found in its "
        "files; `exo-node models show` says why, `exo-node models graft` adds it"
    )


def drafter_words(card: ModelCard) -> str:
    """The drafter or head of the model, in words for a person."""
    return f"the block drafter {card.drafter.model}" if card.drafter else NATIVE


def opted_out_reason(enabled: EnabledState, what: str = NATIVE) -> str:
    """Why a node whose operator turned native MTP off never drafts. `what`: see `drafter_words`."""
    variable, assigned, _ = enabled.source.partition("=")
    if assigned:
        return f"{what} is off by {enabled.source}; set {variable}=1 and start the node again"
    return f"{what} was turned off on {enabled.source}; turn it on there"


def split_reason(num_stages: int, what: str = NATIVE) -> str:
    """Why a model that runs on several nodes never drafts. `what`: see `drafter_words`."""
    return (
        f"{what} needs the whole model on one node, and this placement has {num_stages} "
        "stages; place it on one node, if need be in a smaller quantisation"
    )


def _objection(
    card: ModelCard,
    mtp: DraftDepth,
    num_stages: int,
    head: HeadState,
    enabled: EnabledState,
    requested_k: int | None,
) -> str:
    """The first reason not to draft, the most lasting one first; empty where there is none."""
    if not enabled.enabled:
        return opted_out_reason(enabled, drafter_words(card))
    if num_stages > 1:
        return split_reason(num_stages, drafter_words(card))
    if not head.loaded:
        return head.reason or (
            f"the MTP head of {card.id} is not loaded; load the model again, and if that does "
            "not help download a checkpoint that still has its mtp.* tensors"
        )
    if requested_k == 0:
        return (
            "the request asked for num_draft_tokens = 0; leave it out or ask for 1 to "
            f"{mtp.max_k} to draft"
        )
    return ""


def _none(reason: str) -> Drafting:
    return Drafting("none", 0, reason)


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="num_draft_tokens")
