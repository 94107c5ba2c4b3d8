"""The bits of attention's caches, the same for all stages of a placement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from .card import ModelCard
from .cluster import ClusterView
from .errors import InvalidRequest, LoadFailed

FIELD: Final = "kv_bits"
"""The field of cards and placements; the `param` of errors about it."""
VARIABLE: Final = "EXO_KV_BITS"
"""The variable of a node's setting."""

Choice = Literal[0, 4, 8]
"""Bits that a setting or a placement may name; 0 quantises no caches."""
CHOICES: Final[tuple[int, ...]] = get_args(Choice)

Source = Literal["card", "setting", "placement"]
REMEDIES: Final[Mapping[Source, str]] = {
    "card": f"remove {FIELD} from the card",
    "setting": f"unset {VARIABLE}",
    "placement": f"leave {FIELD} out of the placement, or send 0",
}


@dataclass(frozen=True, slots=True)
class KvBits:
    """The bits of a placement's caches, with the source and the reason."""

    bits: int = 0
    """The bits of a number in attention's caches, or 0 if they are not quantised."""
    source: Source = "card"
    """Whose value that is."""
    reason: str = ""
    """Why, for a person; empty where nothing asks for quantised caches."""


UNQUANTISED: Final = KvBits()


def choose_kv_bits(card: ModelCard, view: ClusterView, requested: int | None) -> KvBits:
    """The placement's own field, else the setting of the head, else the card's.

    A setting does not apply to models whose caches cannot be quantised; a placement that requests
    it for one is refused. Raises InvalidRequest.
    """
    refusal, own = card.kv_refusal or view.kv_refusal(card.id), card.kv_bits or 0
    if requested is not None:
        if requested and refusal:
            raise InvalidRequest(
                f"{FIELD} is {requested}, and {refusal}; {REMEDIES['placement']}", param=FIELD
            )
        reason = f"{FIELD} = {requested} was requested" if requested or own else ""
        return KvBits(requested, "placement", reason)
    if view.kv_bits is None or (view.kv_bits == 0 and own == 0):
        return KvBits(own, "card", "the card says so" if own else "")
    setting = f"{VARIABLE}={view.kv_bits} on the head"
    if view.kv_bits and refusal:
        return KvBits(own, "card", f"{setting} does not apply, because {refusal}")
    return KvBits(view.kv_bits, "setting", setting)


def cached_in(card: ModelCard, bits: int) -> ModelCard:
    """The card of a placement whose attention caches have `bits` a number (0 for `dtype`)."""
    own = bits or None
    return card if own == card.kv_bits else card.model_copy(update={"kv_bits": own})


def source_of(text: str) -> Source:
    """The source that a message names; the card where it names none."""
    match text:
        case "setting" | "placement":
            return text
        case _:
            return "card"


def load_refusal(reason: str, source: Source) -> LoadFailed:
    """The error of a load whose caches cannot be quantised."""
    return LoadFailed(f"{reason}; {REMEDIES[source]}", param=FIELD)


def refusal_in(message: str) -> str:
    """The reason in the message of such an error, without its remedy."""
    for remedy in REMEDIES.values():
        message = message.removesuffix(f"; {remedy}")
    return message
