"""Bounds on every number that another process may send; pure.

A 64-bit field takes numbers that no arithmetic on them survives, and a double takes NaN. What a
field means is checked where it is read; here, that it is a number of a sensible size at all.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_COUNTER: Final = 2**62
"""Terms and incarnations: one more of them still fits the wire."""
MAX_COUNT: Final = 2**53
"""Bytes, steps, milliseconds: they become doubles in JSON and in sums."""
MAX_INT: Final = 2**32 - 1
MAX_REAL: Final = 1e18
"""Seconds, bytes a second."""
MAX_PORT: Final = 65_535
MAX_LAYERS: Final = 2**16
"""Stages, layers, nodes, replicas."""

_Bound = tuple[float, float]
_LAYERS: Final[_Bound] = (0, MAX_LAYERS)
_IDS: Final[_Bound] = (-(2**31), 2**31 - 1)
"""Ids of a prompt, whose rows of images are below 0."""
_ANY_SIGN: Final[_Bound] = (-MAX_REAL, MAX_REAL)
_FIELDS: Final[Mapping[str, _Bound]] = {
    **dict.fromkeys(("Heartbeat.term", "Heartbeat.incarnation"), (0, MAX_COUNTER)),
    **dict.fromkeys(("Heartbeat.life", "View.incarnation"), (0, MAX_COUNTER)),
    **dict.fromkeys(("Epoch.term", "Epoch.number"), (0, MAX_COUNTER)),
    **dict.fromkeys(("Frame.attempt", "Member.attempt"), (0, MAX_COUNTER)),
    **dict.fromkeys(("GenerateRequest.attempt", "ReadBegin.attempt"), (0, MAX_COUNTER)),
    "ParkRequest.attempt": (0, MAX_COUNTER),
    "Sampling.seed": (0, 2**64 - 1),
    "Drafting.num_draft_tokens": (-MAX_LAYERS, MAX_LAYERS),  # refused by its own name there
    **dict.fromkeys(
        ("TokenIds.ids", "Started.prompt_ids", "PrefixRequest.tokens", "PrefixQuery.tokens"), _IDS
    ),
    "ReadBegin.tokens": _IDS,
    **dict.fromkeys(("Hidden.tokens", "Member.delta", "EncodeReply.ids"), _IDS),
}
_NAMES: Final[Mapping[str, _Bound]] = {
    **dict.fromkeys(("port", "http_port"), (0, MAX_PORT)),
    "kv_bits": (0, 32),
    **dict.fromkeys(("stage", "num_stages", "replicas", "min_nodes", "max_nodes"), _LAYERS),
    **dict.fromkeys(("first_layer", "end_layer", "num_layers", "followers"), _LAYERS),
    # Probabilities and penalties, of which the engine says itself what it takes.
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "logit_bias", "logprob"), _ANY_SIGN),
    **dict.fromkeys(("repetition_penalty", "temperature", "top_p", "min_p"), _ANY_SIGN),
    **dict.fromkeys(("xtc_probability", "xtc_threshold"), _ANY_SIGN),
}
_TYPES: Final[Mapping[int, _Bound]] = {
    FieldDescriptor.CPPTYPE_UINT64: (0, MAX_COUNT),
    FieldDescriptor.CPPTYPE_INT64: (0, MAX_COUNT),
    FieldDescriptor.CPPTYPE_UINT32: (0, MAX_INT),
    FieldDescriptor.CPPTYPE_INT32: (0, MAX_INT),
    FieldDescriptor.CPPTYPE_DOUBLE: (0, MAX_REAL),
    FieldDescriptor.CPPTYPE_FLOAT: (0, MAX_REAL),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """The first number that is out of its bounds."""

    field: str
    """The path of the field, such as `views.incarnation`."""
    text: str


def fault(message: Message) -> Fault | None:
    """The first number out of bounds in a message and its inner messages, or None."""
    for field, value in message.ListFields():
        violation = _fault_of(field, value)
        if violation is not None:
            return violation
    return None


def _fault_of(field: FieldDescriptor, value: Any) -> Fault | None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        number = inner.fields_by_name["value"]
        if number.cpp_type not in _TYPES:
            return None
        return _numbers(field, number.cpp_type, value.values())
    if inner is not None:
        messages: Iterable[Message] = value if field.is_repeated else (value,)
        return next(filter(None, (_inside(field, each) for each in messages)), None)
    if field.cpp_type not in _TYPES:
        return None
    numbers: Iterable[float] = value if field.is_repeated else (value,)
    return _numbers(field, field.cpp_type, numbers)


def _inside(field: FieldDescriptor, message: Message) -> Fault | None:
    violation = fault(message)
    return None if violation is None else Fault(f"{field.name}.{violation.field}", violation.text)


def _numbers(field: FieldDescriptor, kind: int, values: Iterable[float]) -> Fault | None:
    owner = field.containing_type
    whole = f"{owner.name if owner else ''}.{field.name}"
    low, high = _FIELDS.get(whole) or _NAMES.get(field.name) or _TYPES[kind]
    for value in values:
        if not low <= value <= high:  # NaN too
            least = f"{low:g} to " if low or math.isnan(value) or value < low else "at most "
            return Fault(field.name, f"is {value}; it may be {least}{high:g}")
    return None
