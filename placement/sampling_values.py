"""A publisher's sampling: its parameters, their bounds, and where each value comes from."""

from collections.abc import Mapping
from typing import Final, Literal, TypedDict

from .config import MAX_VOCAB

Source = Literal["request", "profile", "card", "generation_config.json", "default"]
"""The source of a sampling parameter's value; earlier ones win."""

API_DEFAULTS: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""The values where no other source has one: the model's own distribution."""
_LEAST: Final = 1e-9
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (_LEAST, 1),
    "top_k": (0, MAX_VOCAB),
    "min_p": (0, 1),
    "repetition_penalty": (_LEAST, 10),
}

_Sources = tuple[tuple[Source, Mapping[str, float]], ...]


class SourcedValue(TypedDict):
    """A sampling parameter as lists and statistics show it."""

    value: float
    source: Source


def usable_value(name: str, value: object) -> float | None:
    """The value of a parameter as a file or a peer has it, or None if it is none of its values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    low, high = _BOUNDS[name]
    if not low <= value <= high:  # NaN too
        return None
    if name != "top_k":
        return float(value)
    return int(value) if value == int(value) else None


def model_sampling(
    card: Mapping[str, float], published: Mapping[str, float]
) -> dict[str, SourcedValue]:
    """Each parameter of requests that set none, by the fields that a card has, and those that
    `published`, generation_config.json, has. Values out of bounds, of a peer, count as absent."""
    sources: _Sources = (
        ("card", card),
        ("generation_config.json", published),
        ("default", API_DEFAULTS),
    )
    return {name: _first(name, sources) for name in API_DEFAULTS}


def _first(name: str, sources: _Sources) -> SourcedValue:
    for source, values in sources:
        if (value := usable_value(name, values.get(name))) is not None:
            return SourcedValue(value=value, source=source)
    raise AssertionError(name)
