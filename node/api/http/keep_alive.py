"""`keep_alive`, Ollama's field: how long a model stays loaded after a request."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from ...machine.setting_values import duration_s


def _as_duration(value: Any) -> Any:
    if value is None or value == "":
        return None
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise PydanticCustomError("duration", "should be a duration such as 5m, 0 or -1")
    try:
        return duration_s(value)
    except ValueError as fault:
        raise PydanticCustomError("duration", "{why}", {"why": str(fault)}) from None


def _as_json(seconds: float | None) -> float | None:
    """JSON has no infinity; to Ollama -1 is for ever."""
    return -1 if seconds is not None and math.isinf(seconds) else seconds


KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=True)] | None,
    BeforeValidator(_as_duration, json_schema_input_type=str | float | None),
    PlainSerializer(_as_json, return_type=float | None),
]
"""Seconds; infinity: for ever; None: the node's setting applies."""
